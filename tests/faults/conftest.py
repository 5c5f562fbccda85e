"""The warm server of this directory's tests, and the number of kills at the end of the run."""
import pytest


@pytest.fixture(scope="session")
def server():
    from faults.rounds import Server
    server = Server()
    yield server
    server.close()


def pytest_terminal_summary(terminalreporter):
    reports = [report for key in ("passed", "failed") for report in terminalreporter.stats.get(key, ())]
    properties = [dict(report.user_properties) for report in reports if getattr(report, "when", None) == "call"]
    kills = sum(found.get("kills", 0) for found in properties)
    steps = {step for found in properties for step in found.get("steps", ())}
    if kills:
        terminalreporter.write_line(f"tests/faults: {kills} kills (SIGKILL) of a rank in the middle of a save, "
                                    f"at {len(steps)} named steps")
