"""What the workers of the tests' jobs check with, those of tests/torch too."""

import gradwire
from gradwire import Code, GradwireError


def expect(condition, text):
    if not condition:
        raise AssertionError(f"rank {gradwire.rank()}: {text}")


def refused(part, function, *arguments, code=Code.INVALID_ARGUMENT, **named):
    """The call must fail with that code and those words. Returns the error."""
    try:
        function(*arguments, **named)
    except GradwireError as error:
        expect(error.code == code, f"{error!r}: code {error.code}, expected {code}")
        expect(part in str(error), f"'{part}' is not in: {error}")
        return error
    raise AssertionError(f"{function} was accepted, expected '{part}'")
