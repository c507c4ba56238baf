/* Preloaded into a server: moves its wall clock by the seconds in the file that WALL_CLOCK_OFFSET_FILE names, and leaves the monotonic one alone. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *time)
{
    int result = (int)syscall(SYS_clock_gettime, clock, time);
    const char *path = getenv("WALL_CLOCK_OFFSET_FILE");
    if (result == 0 && path != NULL && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        char text[32] = {0};
        int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file >= 0) {
            if (read(file, text, sizeof text - 1) > 0)
                time->tv_sec += (time_t)strtoll(text, NULL, 10);
            close(file);
        }
    }
    return result;
}
