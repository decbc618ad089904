"""Tests marked ``fake_cuda`` run in another pytest process, which was started on the fake device.

The device's libraries are preloaded when a process starts, so a test cannot load them later. The
ranks and scripts of such a test are children of that process, and have the device as well. One such
process serves all marked tests of a pytest worker. Its reports appear as those of the tests.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Final

import pytest

from tests.harness.children import Child, end, wait_any

from . import environment, is_here, why_not

MARKER: Final = "fake_cuda"
_CONNECTION: Final = "FAKE_CUDA_ORDERS"
_DUMP_TIMEOUT_S: Final = 5.0
_OUTPUT_LIMIT_BYTES: Final = 20_000


# The nodeid of a test, and that of the next one, which may share fixtures with it.
Order = tuple[str, str | None]


def plugin(config: pytest.Config) -> "OnFakeDevice | Served | None":
    """Return the plugin for marked tests. None if all tests of this process can run in it."""
    if _CONNECTION in os.environ:
        return Served(config, Connection(int(os.environ.pop(_CONNECTION))))
    return None if is_here() else OnFakeDevice()


class Server:
    """The parent's handle of the pytest process on the device."""

    def __init__(self, files: list[Path], root: Path) -> None:
        self._orders, theirs = Pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        words = ["-X", "faulthandler", "-m", "pytest", "-p", "no:cacheprovider", *map(str, files)]
        with theirs:
            self._process = Child(
                [sys.executable, *words],
                {**os.environ, **environment(), _CONNECTION: str(theirs.fileno())},
                death_signal=signal.SIGKILL,
                cwd=root,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )

    def run(self, order: Order) -> Iterator[dict[str, Any]]:
        """Run one test and yield its reports. Raises `EOFError` if the process ends meanwhile."""
        try:
            self._orders.send(order)
            while (report := self._orders.recv()) is not None:
                yield report
        except OSError as error:  # a broken pipe
            raise EOFError from error

    def fail(self) -> str:
        """End the process and return its output, with the stacks of its threads."""
        self._process.signal_session(signal.SIGABRT)
        wait_any([self._process], _DUMP_TIMEOUT_S)
        self.close(grace_s=0.0)
        self._output.seek(0)
        return self._output.read()[-_OUTPUT_LIMIT_BYTES:].decode(errors="replace")

    def close(self, grace_s: float = 10.0) -> None:
        """Let the process end by itself, and kill it after ``grace_s``."""
        self._orders.close()
        if grace_s:
            wait_any([self._process], grace_s)
        end([self._process], grace_s=0.0)


class OnFakeDevice:
    """Runs marked tests in the process on the device. Skips them if the device cannot be built."""

    def __init__(self) -> None:
        self._server: Server | None = None
        self._files: list[Path] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        marked = [item for item in items if item.get_closest_marker(MARKER)]
        if marked and (reason := why_not()):
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))
        elif marked:
            self._files = sorted({item.path for item in marked})

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        if not self._files or not item.get_closest_marker(MARKER):
            return None
        following = None
        if nextitem is not None and nextitem.get_closest_marker(MARKER):
            following = nextitem.nodeid
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(item, (item.nodeid, following)):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        # Tears down fixtures of the test before this one, which ran in this process.
        item.session._setupstate.teardown_exact(nextitem)
        return True

    def _reports(self, item: pytest.Item, order: Order) -> Iterator[pytest.TestReport]:
        try:
            if self._server is None:
                self._server = Server(self._files, item.config.rootpath)
            for data in self._server.run(order):
                yield item.config.hook.pytest_report_from_serializable(
                    config=item.config, data=data
                )
        except EOFError:
            yield self._failure(item, "the process on the fake device died")
        except pytest.fail.Exception as error:  # raised by pytest-timeout
            yield self._failure(item, str(error))

    def _failure(self, item: pytest.Item, reason: str) -> pytest.TestReport:
        """End the process on the device and return a report with its output."""
        output = self._server.fail() if self._server is not None else ""
        self._server = None
        message = f"{reason}; its output:\n{output}"
        return pytest.TestReport(item.nodeid, item.location, {}, "failed", message, "call")

    def pytest_unconfigure(self) -> None:
        if self._server is not None:
            self._server.close()


class Served:
    """The plugin in the process on the device: runs the tests of its orders and sends reports."""

    def __init__(self, config: pytest.Config, orders: "Connection[Any, Any]") -> None:
        self._config = config
        self._orders = orders

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        try:
            while True:
                nodeid, following = self._orders.recv()
                nextitem = None if following is None else items[following]
                self._config.hook.pytest_runtest_protocol(item=items[nodeid], nextitem=nextitem)
                self._orders.send(None)
        except EOFError:
            return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._orders.send(
            self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        )
