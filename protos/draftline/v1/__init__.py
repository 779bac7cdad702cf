"""Version 1 of the API. Import `inference_pb2` (messages) and `inference_pb2_grpc` (stubs)."""
