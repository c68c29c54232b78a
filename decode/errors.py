"""The one error type for mistakes that a user can mend."""


class UserError(ValueError):
    """A foreseeable mistake: says what was seen, what was wanted and what to do next.

    The command-line front ends print it without a traceback and exit with status 2.
    """
