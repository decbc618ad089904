"""Tests that run alone, and those that run beside others."""

import threading
from pathlib import Path

import pytest

from .turnstile import Company, Turnstile
from .waiting import eventually


def enter(
    turnstile: Turnstile, log: list[str], name: str, go_on: threading.Event, company: Company
) -> threading.Thread:
    def run() -> None:
        with turnstile.passed(company):
            log.append(name)
            assert go_on.wait(20)
            log.append(f"{name} ends")

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("beside", "company"),
    [(Company.CROWD, Company.ALONE), (Company.CROWD, Company.QUIET), (Company.QUIET, Company.ALONE)],
)
def test_one_alone_waits_for_the_others_and_they_for_it(
    beside: Company, company: Company, tmp_path: Path
) -> None:
    first, second = Turnstile(tmp_path, 0, 2), Turnstile(tmp_path, 1, 2)
    log: list[str] = []
    goes_on, alone, later = threading.Event(), threading.Event(), threading.Event()
    threads = [enter(first, log, "a", goes_on, beside)]
    assert eventually(lambda: log == ["a"])
    threads.append(enter(second, log, "alone", alone, company))
    third = Turnstile(tmp_path, 0, 2)  # the first worker's next test
    threads.append(enter(third, log, "b", later, beside))
    goes_on.set()
    assert eventually(lambda: "alone" in log or "b" in log)
    alone.set()
    later.set()
    for thread in threads:
        thread.join()
    begins = log.index("alone")
    assert log[begins + 1] == "alone ends", "nobody entered meanwhile"


@pytest.mark.parametrize("company", [Company.CROWD, Company.QUIET])
def test_two_of_a_kind_run_beside_each_other(company: Company, tmp_path: Path) -> None:
    both = threading.Barrier(2, timeout=20)

    def run(worker: int) -> None:
        with Turnstile(tmp_path, worker, 2).passed(company):
            both.wait()

    threads = [threading.Thread(target=run, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not both.broken
