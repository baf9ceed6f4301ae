"""The null GPU and the watchdog threads of torch's NCCL groups, which sleep for 100 ms."""

import shutil
import subprocess
from pathlib import Path

import pytest

from launcher.tools.rehearse.build import FLAGS, SOURCES

# The watchdog sleeps as std::condition_variable::wait_for does, for longer than any test lasts.
PROGRAM = """
#define _GNU_SOURCE
#include "watchdog.h"
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <time.h>
int64_t _ZNSt6chrono3_V212steady_clock3nowEv(void);
int64_t _ZNSt6chrono3_V212system_clock3nowEv(void);
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
static volatile int looks, asleep;
static void *watch(void *name) {
    pthread_setname_np(pthread_self(), name);
    pthread_mutex_lock(&mutex);
    for (;;) {
        int64_t until = _ZNSt6chrono3_V212steady_clock3nowEv() + 1000000000000;
        struct timespec real;
        clock_gettime(CLOCK_REALTIME, &real);
        real.tv_sec += 1000;
        asleep++;
        do
            pthread_cond_timedwait(&condition, &mutex, &real);
        while (_ZNSt6chrono3_V212system_clock3nowEv() < real.tv_sec * 1000000000 + real.tv_nsec
               || _ZNSt6chrono3_V212steady_clock3nowEv() < until);
        looks++;
    }
    return NULL;
}
int main(int count, char **names) {
    pthread_t thread;
    pthread_create(&thread, NULL, watch, names[count - 1]);
    while (!asleep)
        ;
    pthread_mutex_lock(&mutex); /* it sleeps, and not only says so */
    pthread_mutex_unlock(&mutex);
    for (int step = 0; step < 3; step++) {
        int before = looks;
        watchdogs_look();
        int unasked = looks - before;
        watchdogs_owe();
        watchdogs_look();
        printf("%d %d ", unasked, looks > before);
    }
    int64_t now = _ZNSt6chrono3_V212steady_clock3nowEv();
    struct timespec real;
    clock_gettime(CLOCK_MONOTONIC, &real);
    printf("%d", real.tv_sec * 1000000000 + real.tv_nsec - now < 1000000000);
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc to build the program with")
    folder = tmp_path_factory.mktemp("watchdog")
    (folder / "main.c").write_text(PROGRAM)
    sources = (str(folder / "main.c"), str(SOURCES / "watchdog.c"))
    output = ("-o", str(folder / "program"), "-ldl")
    subprocess.run([compiler, *FLAGS, "-Werror", f"-I{SOURCES}", *sources, *output], check=True)
    return folder / "program"


def printed(program: Path, name: str) -> str:
    done = subprocess.run([program, name], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def test_a_host_that_waits_for_the_device_wakes_a_watchdog_after_collectives(program: Path) -> None:
    assert printed(program, "pt_nccl_watchdg") == "0 1 0 1 0 1 1"


def test_other_threads_sleep_on(program: Path) -> None:
    assert printed(program, "pt_nccl_heartbt") == "0 0 0 0 0 0 1"
