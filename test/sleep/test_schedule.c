/* test_schedule: times of day of nightly runs, also on the days on which the clocks change. */
/* levels: once */
#define _GNU_SOURCE
#include "sleep/sleep.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <time.h>

#include <cmocka.h>

static void zone_set(const char *zone) {
    setenv("TZ", zone, 1);
    tzset();
}

static void test_next(void **state) {
    (void)state;
    static const struct {
        const char *zone;
        int64_t now;
        int minute;
        int64_t next;
    } cases[] = {
        {"UTC0", 0, 0, 86400}, /* midnight itself is over */
        {"UTC0", 0, 1, 60},
        {"UTC0", 59, 1, 60},
        {"UTC0", 60, 1, 86460},
        {"UTC0", 86399, 23 * 60 + 59, 86400 + 86340},
        {"JST-9", 0, 9 * 60 + 1, 60},
        {"JST-9", 0, 8 * 60 + 59, 86340},
        /* 2026-03-29 02:00 is 03:00 in central Europe, 2026-10-25 03:00 is 02:00 */
        {"CET-1CEST,M3.5.0,M10.5.0/3", 1774738800, 4 * 60, 1774749600},
        {"CET-1CEST,M3.5.0,M10.5.0/3", 1774738800, 2 * 60 + 30, 1774747800},
        {"CET-1CEST,M3.5.0,M10.5.0/3", 1792879200, 4 * 60, 1792897200},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        zone_set(cases[i].zone);
        assert_int_equal(sleep_time_next(cases[i].now, cases[i].minute), cases[i].next);
    }
    zone_set("UTC0");
}

static void test_parse(void **state) {
    (void)state;
    static const char *const refused[] = {"",      "3:30",  "24:00", "12:60", " 3:30",
                                          "+3:30", "03.30", "03:3x", "003:3", "03:300"};
    struct error err;
    int minute;
    assert_int_equal(sleep_time_parse("00:00", &minute, &err), OK);
    assert_int_equal(minute, 0);
    assert_int_equal(sleep_time_parse("23:59", &minute, &err), OK);
    assert_int_equal(minute, 23 * 60 + 59);
    for (size_t i = 0; i < ARRAY_LEN(refused); i++)
        assert_int_equal(sleep_time_parse(refused[i], &minute, &err), ERR_USAGE);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_next), cmocka_unit_test(test_parse)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
