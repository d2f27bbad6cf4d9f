"""The errors a user can meet. Each message is one plain sentence: what was wrong, where, and what would work."""


class MercerError(Exception):
    """Base of every error that Mercer raises on purpose."""


class InvalidArgument(MercerError, ValueError):
    """A value is malformed, out of range or does not fit the others."""


class Unsupported(MercerError):
    """The parts are valid but cannot be combined; the message says what would work instead."""


class NonFinite(MercerError, ArithmeticError):
    """A computation left the range of its dtype; the message says where and why."""


class StorageError(MercerError, OSError):
    """A file could not be read or written; the message names it and says what is still intact."""


class Interrupted(MercerError):
    """Work was stopped by a signal after it was saved; the message says how to continue."""


class PeerError(MercerError, ConnectionError):
    """Another process did not send or take what it should have in time; the message names it, the step, the limit."""
