"""The one exception that means "the user can fix this"."""


class UserError(ValueError):
    """A user's mistake: one line that names the setting and says what would work.

    ``train.py`` and the other commands print it without a traceback and exit with code 2.
    """
