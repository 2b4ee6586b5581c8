"""Tests of PEFT's that SUPRA fails, each with its reason: an unlisted failure and a listed pass are errors."""

# (regex on the test's name, PEFT versions it holds for (a prefix; "" is all), reason)
EXPECTED_FAILURES: list[tuple[str, str, str]] = []
