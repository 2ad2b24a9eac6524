"""The end of a connection whose client is still sending."""

from __future__ import annotations

from unittest.mock import Mock

from pagerunner.server.lingering import LingeringTransport


def test_a_client_that_has_reset_the_connection_is_closed_at_once() -> None:
    transport = Mock(is_closing=Mock(return_value=False), write_eof=Mock(side_effect=OSError(107, "not connected")))
    LingeringTransport(transport, lambda: True).close()
    transport.close.assert_called_once_with()
    transport.resume_reading.assert_not_called()
