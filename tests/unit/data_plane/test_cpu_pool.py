"""Loops shared out among threads: every piece is done once, whoever calls, whatever became of the threads."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from draftline_server.model import cpu_kernels, native_library

if cpu_kernels.load() is None:
    pytest.skip("this machine cannot have the kernels", allow_module_level=True)

Task = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


@pytest.fixture
def pool() -> Iterator[ctypes.CDLL]:
    library = native_library.load(native_library.CPU_KERNELS)
    assert library is not None
    library.pool_run.argtypes = [Task, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    library.pool_run.restype = None
    library.pool_set_threads(4)  # more than there may be cores
    yield library
    library.pool_set_threads(torch.get_num_threads())


def run(pool: ctypes.CDLL, count: int, piece: int = 0) -> list[int]:
    """How often each iteration of a loop was done."""
    done = [0] * count

    def task(_: object, begin: int, end: int) -> None:
        for index in range(begin, end):
            done[index] += 1

    pool.pool_run(Task(task), None, count, piece)
    return done


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 15, 16, 17, 1000])
def test_every_iteration_is_done_once(pool: ctypes.CDLL, count: int) -> None:
    for piece in (0, 1, 3, 2000):
        for _ in range(20):
            assert run(pool, count, piece) == [1] * count


def test_a_loop_is_done_when_the_call_returns_also_after_threads_slept(pool: ctypes.CDLL) -> None:
    for pause in (0.0, 0.01, 0.0, 0.001):
        threading.Event().wait(pause)
        assert run(pool, 64) == [1] * 64


def test_more_threads_than_one_take_part(pool: ctypes.CDLL) -> None:
    seen: set[int] = set()
    meeting = threading.Barrier(2, timeout=30)

    def task(_: object, begin: int, end: int) -> None:
        seen.add(threading.get_native_id())
        if begin == 0 or end == 64:
            meeting.wait()  # two pieces at once, or never

    pool.pool_run(Task(task), None, 64, 0)
    assert len(seen) > 1


def test_fewer_threads_take_part_once_there_are_to_be_fewer(pool: ctypes.CDLL) -> None:
    run(pool, 64)
    pool.pool_set_threads(2)
    seen: set[int] = set()

    def task(_: object, begin: int, end: int) -> None:
        seen.add(threading.get_native_id())

    for _ in range(200):
        pool.pool_run(Task(task), None, 64, 1)
    assert len(seen) <= 2


def test_the_number_of_threads_may_change_while_a_loop_runs(pool: ctypes.CDLL) -> None:
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            for threads in (1, 4, 2, 8):
                pool.pool_set_threads(threads)

    changer = threading.Thread(target=change)
    changer.start()
    try:
        for _ in range(200):
            assert run(pool, 50) == [1] * 50
    finally:
        stop.set()
        changer.join()


def test_a_loop_inside_of_a_loop_is_done_by_its_own_thread(pool: ctypes.CDLL) -> None:
    inner: list[list[int]] = []

    def task(_: object, begin: int, end: int) -> None:
        inner.extend(run(pool, 10) for _ in range(begin, end))

    pool.pool_run(Task(task), None, 16, 1)
    assert inner == [[1] * 10] * 16


def test_callers_in_several_threads_do_not_get_in_each_others_way(pool: ctypes.CDLL) -> None:
    failures: list[list[int]] = []

    def call() -> None:
        for _ in range(100):
            if (done := run(pool, 33)) != [1] * 33:
                failures.append(done)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failures


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_products_are_the_same_with_any_number_of_threads(pool: ctypes.CDLL, threads: int) -> None:
    kernels = cpu_kernels.load()
    assert kernels is not None
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16):
        weight = kernels.pack(torch.randn(500, 96, generator=generator).to(dtype))
        x = torch.randn(70, 96, generator=generator)
        pool.pool_set_threads(1)
        expected = kernels.linear(x, weight, None)
        pool.pool_set_threads(threads)
        for _ in range(20):
            assert torch.equal(kernels.linear(x, weight, None), expected)


def test_a_child_of_a_process_that_used_the_pool_has_one_of_its_own() -> None:
    """Also one that is forked while another thread runs loops."""
    script = """
import os, threading, torch
from draftline_server.model import cpu_kernels
kernels = cpu_kernels.load()
kernels._library.pool_set_threads(3)
weight = kernels.pack(torch.ones(512, 64))
x = torch.ones(8, 64)

def multiply():
    sums = {float(kernels.linear(x, weight, None).sum()) for _ in range(300)}
    assert sums == {8.0 * 512 * 64}, sums

multiply()
busy = threading.Thread(target=multiply)
busy.start()
for _ in range(5):
    child = os.fork()
    if child == 0:
        alone = len(os.listdir("/proc/self/task"))
        kernels._library.pool_set_threads(3)
        multiply()
        os._exit(0 if len(os.listdir("/proc/self/task")) == alone + 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
busy.join()
multiply()
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, env=environment)
