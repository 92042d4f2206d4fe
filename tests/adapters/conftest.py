from tests.support.sentences import no_error_shows_a_missing_value

__all__ = ["no_error_shows_a_missing_value"]
