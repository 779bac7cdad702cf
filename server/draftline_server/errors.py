"""Every error that the server raises on purpose.

    DraftlineError
    ├── StartupError            the process cannot start: one line, exit code 2
    │   ├── ConfigError           a key of the configuration file
    │   ├── ModelError            a model's files, tokenizer or architecture
    │   │   └── PairMismatchError     sound models that do not fit together, or are not the expected pair
    │   ├── ResourceError         a port, the device or the memory
    │   │   └── MemoryShortageError   the models do not fit into the memory there is
    │   └── FetchError            a model's files cannot be brought here
    └── RequestError            one request cannot be served; others are not affected
        ├── InvalidRequestError   bad input; names the field
        ├── QueueFullError        too many requests wait; try again after `retry_after_seconds`
        ├── UnavailableError      not ready, draining, or the engine failed
        ├── DeadlineError         the request's time ran out
        ├── CancelledError        the client went away
        └── InternalError         ours; the message has an id that the log explains, or what is known of it

Messages of `RequestError` go to clients: no paths, no class names, no prompt text.
"""


class DraftlineError(Exception):
    """The root of the tree above."""


class StartupError(DraftlineError):
    """The process cannot start. The message is one line and names the field or file at fault."""


class ConfigError(StartupError):
    """A key of the configuration is unknown, missing or wrong."""


class ModelError(StartupError):
    """A model cannot be loaded, or a pair does not fit together."""


class PairMismatchError(ModelError):
    """Each model is sound, but they do not fit together, or are not the pair that was expected."""


class ResourceError(StartupError):
    """The machine lacks a port, a device ability or memory."""


class MemoryShortageError(ResourceError):
    """The models, or a cache that serves one request, do not fit into the memory."""


class FetchError(StartupError):
    """A model's files cannot be brought here. No credentials in the message."""


class RequestError(DraftlineError):
    """One request cannot be served."""


class InvalidRequestError(RequestError):
    """Bad input. `field` is its path in the request, such as ``sampling.top_p``.

    `quotes_input` says that the reason may repeat what the client sent, so that no log may hold it.
    """

    def __init__(self, field: str, reason: str, *, quotes_input: bool = False) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason
        self.quotes_input = quotes_input


class QueueFullError(RequestError):
    """The queue is full. `retry_after_seconds` is when a retry is worth trying."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class UnavailableError(RequestError):
    """The server is not ready, draining or broken; another replica may serve the request."""

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class DeadlineError(RequestError):
    """The request's deadline, the server's time limit or its queue limit passed."""


class CancelledError(RequestError):
    """The client cancelled the request or disconnected."""


class InternalError(RequestError):
    """A fault of ours. The message holds an id that the log explains, or what is known of it."""
