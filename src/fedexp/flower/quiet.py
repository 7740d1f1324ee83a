"""`quietly`: a train function behind a mod whose promise is that nothing of the data is told."""

from __future__ import annotations

from flwr.app import Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from fedexp.errors import UsageError, require


def quietly(call_next: ClientAppCallable, message: Message, context: Context) -> RecordDict:
    """Train. What an error says might tell of the data, and error texts reach the server."""
    try:
        reply = call_next(message, context)
    except UsageError:  # it names a remedy, and nothing of the data
        raise
    except Exception as error:
        name = type(error).__name__
        raise RuntimeError(f"training raised {name}; the log of the client says why") from error
    require(reply.has_content(), "the train function replied with an error")
    return reply.content
