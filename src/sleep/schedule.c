/* schedule: the time of day of nightly runs. */
#define _GNU_SOURCE
#include "sleep/sleep.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

int sleep_time_parse(const char *text, int *minute, struct error *err) {
    static const char form[] = "dd:dd";
    bool valid = strlen(text) == strlen(form);
    for (int i = 0; valid && form[i]; i++)
        valid = form[i] == 'd' ? text[i] >= '0' && text[i] <= '9' : text[i] == form[i];
    const int hours = valid ? atoi(text) : 24, minutes = valid ? atoi(text + 3) : 60;
    *minute = 60 * hours + minutes;
    if (hours < 24 && minutes < 60) return OK;
    return error_set(err, ERR_USAGE, "'%.20s' is not a time of day such as 03:30", text);
}

int64_t sleep_time_next(int64_t now, int minute) {
    const time_t t = (time_t)now;
    for (int days = 0;; days++) {
        struct tm at;
        localtime_r(&t, &at);
        at.tm_mday += days;
        at.tm_hour = minute / 60;
        at.tm_min = minute % 60;
        at.tm_sec = 0;
        at.tm_isdst = -1;
        const int64_t next = mktime(&at);
        if (next > now) return next;
    }
}
