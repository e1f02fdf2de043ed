"""What a client is told when a request cannot be served: a status, OpenAI's error body, and headers."""

INVALID = "invalid_request_error"


class ApiError(Exception):
    """Ends a request. message: one sentence for the client's user; no text of a prompt and no key stands in it.

    type, param, code: OpenAI's classes; param is the path of a field in the body.
    """

    def __init__(self, status: int, message: str, *, type: str = INVALID, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code
        self.headers: dict[str, str] = {}

    def body(self) -> dict:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class BadRequest(ApiError):
    """The body says what is wrong or not supported, and the message says which."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(400, message, param=param)


class ContextExceeded(ApiError):
    """A prompt that leaves no room for an answer.

    opencode compacts its conversation where the text holds "maximum context length is N tokens", N without separators.
    """

    def __init__(self, tokens: int, limit: int):
        """tokens: the prompt's. limit: the longest sequence, with the answer."""
        message = f"the maximum context length is {limit} tokens, the prompt has {tokens}: reduce the length of the messages"
        super().__init__(400, message, param="messages", code="context_length_exceeded")


class Unauthorized(ApiError):
    """No key, or one that the server does not know."""

    def __init__(self, message: str = "expected a key of this server in Authorization: Bearer KEY"):
        super().__init__(401, message, code="invalid_api_key")
        self.headers["WWW-Authenticate"] = "Bearer"


class Forbidden(ApiError):
    """A route of the administrator's."""

    def __init__(self, message: str):
        super().__init__(403, message, type="permission_error", code="forbidden")


class ModelNotFound(ApiError):
    """A model that the server does not serve."""

    def __init__(self, asked: str, served: str):
        super().__init__(404, f"there is no model {asked[:100]!r} here, only {served!r}", param="model", code="model_not_found")


class TooLarge(ApiError):
    """A body above a limit. To its words opencode compacts as well."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(413, f"{message}: reduce the length of the messages", param=param, code="request_too_large")


class Busy(ApiError):
    """The queue is full. seconds: after which to try again."""

    def __init__(self, message: str, seconds: int = 1):
        super().__init__(429, message, type="rate_limit_error", code="queue_full")
        self.headers["Retry-After"] = str(seconds)


class Unavailable(ApiError):
    """The server loads or drains. seconds: after which to try again."""

    def __init__(self, message: str, seconds: int = 5):
        super().__init__(503, message, type="server_error", code="unavailable")
        self.headers["Retry-After"] = str(seconds)


def internal() -> ApiError:
    """For what nobody foresaw: the log has it, the client is told nothing of it."""
    return ApiError(500, "the server failed at this request; its log says why", type="server_error", code="internal_error")
