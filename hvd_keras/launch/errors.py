"""The error for a job that the launcher refuses."""


class UsageError(Exception):
    """The job cannot be started as asked; the text says what was got and expected."""
