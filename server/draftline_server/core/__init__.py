"""Pure Python: requests, blocks, the schedule and text. No torch, no gRPC, no clock of its own."""
