/* Adds a fixed time to every flush of a process: preloaded, it stands before the C library's fsync and fdatasync, calls
   them, and then sleeps. An ordinary cloud disk needs about a millisecond where a local one needs less than a tenth.
   FLUSH_MICROSECONDS says how long it sleeps. Nothing else changes; a flush that fails still fails. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <time.h>

static int slowly(int (*flush)(int), int file) {
    int result = flush(file), error = errno;
    const char *told = getenv("FLUSH_MICROSECONDS");
    long left = told ? atol(told) : 0;
    struct timespec rest = {left / 1000000, left % 1000000 * 1000};
    while (nanosleep(&rest, &rest) != 0 && errno == EINTR) {
    }
    errno = error;
    return result;
}

int fsync(int file) {
    static int (*flush)(int);
    if (!flush)
        flush = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    return slowly(flush, file);
}

int fdatasync(int file) {
    static int (*flush)(int);
    if (!flush)
        flush = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    return slowly(flush, file);
}
