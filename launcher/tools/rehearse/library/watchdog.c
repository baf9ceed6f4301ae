/* See watchdog.h. The watchdog sleeps in pthread_cond_timedwait, and C++ then asks the clock whether
 * the time is over: so both are defined here before the C and C++ libraries', and a watchdog that is
 * woken finds the clock where it has waited for. All other threads' calls are handed on.
 */
#define _GNU_SOURCE
#include "watchdog.h"
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { MOST_WATCHDOGS = 256, PATIENCE = 1000 }; /* 0.1 s: what a look costs at most without us */
static const char NAME[] = "pt_nccl_watchdg";

typedef struct {
    bool used;
    pthread_cond_t *sleeps_on;    /* NULL: awake */
    unsigned long looking, looked; /* for which call of watchdogs_look it is, and was, awake */
} Watchdog;

typedef int (*Timedwait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);

static Watchdog watchdogs[MOST_WATCHDOGS];
static unsigned long wanted;
static atomic_bool owed;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_key_t at_exit;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static Timedwait next_timedwait;

static __thread bool known; /* whether this thread is a watchdog */
static __thread Watchdog *own;
static __thread int64_t steady_ahead_ns, system_ahead_ns; /* once, to who asks next */

static void gone(void *watchdog) {
    pthread_mutex_lock(&mutex);
    ((Watchdog *)watchdog)->used = false;
    pthread_mutex_unlock(&mutex);
}

static void begin(void) {
    pthread_key_create(&at_exit, gone);
    /* The first one is of 1997, and takes other conditions. */
    next_timedwait = (Timedwait)dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!next_timedwait)
        next_timedwait = (Timedwait)dlsym(RTLD_NEXT, "pthread_cond_timedwait");
}

static Watchdog *watchdog_of_this_thread(void) {
    char name[16] = "";
    if (known)
        return own;
    known = true;
    pthread_getname_np(pthread_self(), name, sizeof name);
    if (strcmp(name, NAME))
        return NULL;
    pthread_mutex_lock(&mutex);
    for (int number = 0; number < MOST_WATCHDOGS && !own; number++)
        if (!watchdogs[number].used) {
            watchdogs[number] = (Watchdog){.used = true};
            own = &watchdogs[number];
        }
    pthread_mutex_unlock(&mutex);
    if (own)
        pthread_setspecific(at_exit, own);
    return own;
}

static int64_t now_ns(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

int pthread_cond_timedwait(
    pthread_cond_t *condition, pthread_mutex_t *held, const struct timespec *until) {
    pthread_once(&once, begin);
    Watchdog *its = watchdog_of_this_thread();
    int result = 0;
    if (!its)
        return next_timedwait(condition, held, until);
    pthread_mutex_lock(&mutex);
    its->looked = its->looking;
    its->sleeps_on = condition;
    bool sleeps = its->looking == wanted;
    pthread_mutex_unlock(&mutex);
    if (sleeps)
        result = next_timedwait(condition, held, until);
    pthread_mutex_lock(&mutex);
    its->sleeps_on = NULL;
    bool woken = its->looking != wanted;
    its->looking = wanted;
    pthread_mutex_unlock(&mutex);
    if (!woken)
        return result;
    int64_t left = until->tv_sec * INT64_C(1000000000) + until->tv_nsec - now_ns(CLOCK_REALTIME);
    /* A millisecond more, as the two clocks are not read at once. */
    steady_ahead_ns = system_ahead_ns = left > 0 ? left + 1000000 : 0;
    return ETIMEDOUT;
}

/* std::chrono::steady_clock::now and system_clock::now. */
int64_t _ZNSt6chrono3_V212steady_clock3nowEv(void) {
    int64_t ahead_ns = steady_ahead_ns;
    steady_ahead_ns = 0;
    return now_ns(CLOCK_MONOTONIC) + ahead_ns;
}

int64_t _ZNSt6chrono3_V212system_clock3nowEv(void) {
    int64_t ahead_ns = system_ahead_ns;
    system_ahead_ns = 0;
    return now_ns(CLOCK_REALTIME) + ahead_ns;
}

void watchdogs_owe(void) { owed = true; }

/* Wake those that sleep; whether all have looked since. */
static bool all_have_looked(unsigned long call) {
    bool all = true;
    pthread_mutex_lock(&mutex);
    for (int number = 0; number < MOST_WATCHDOGS; number++) {
        Watchdog *each = &watchdogs[number];
        if (!each->used || each->looked >= call)
            continue;
        all = false;
        if (each->sleeps_on)
            pthread_cond_broadcast(each->sleeps_on);
    }
    pthread_mutex_unlock(&mutex);
    return all;
}

void watchdogs_look(void) {
    if (own || !atomic_exchange(&owed, false))
        return;
    pthread_mutex_lock(&mutex);
    unsigned long call = ++wanted;
    pthread_mutex_unlock(&mutex);
    /* A watchdog may want a lock that the caller holds, so it is not waited for without end. */
    for (int tries = 0; !all_have_looked(call) && tries < PATIENCE; tries++)
        nanosleep(&(struct timespec){0, 100000}, NULL);
}
