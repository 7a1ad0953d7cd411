/*
 * abi: the layout of the public structs and the values of the public enums, which programs that
 * were compiled against an earlier libshoal.so.0 rely on. A change that fails here needs another
 * version of the library (SONAME in the Makefile). test_abi.sh compiles this file as C11 and C++.
 */
#include "shoal.h"

#include <stddef.h>

#ifdef __cplusplus
#define ASSERT static_assert
#else
#define ASSERT _Static_assert
#endif
#define SIZE(type, bytes) ASSERT(sizeof(struct type) == (bytes), #type)
#define AT(type, field, bytes)                                                                     \
    ASSERT(offsetof(struct type, field) == (bytes), #type "." #field)
#define VALUE(name, value) ASSERT((name) == (value), #name)

SIZE(shoal_error, 2052);
AT(shoal_error, text, 4);
SIZE(shoal_progress, 40);
AT(shoal_progress, done, 8);
AT(shoal_progress, total, 16);
AT(shoal_progress, seconds, 24);
AT(shoal_progress, detail, 32);
SIZE(shoal_callbacks, 24);
AT(shoal_callbacks, message, 8);
AT(shoal_callbacks, ctx, 16);
SIZE(shoal_message, 16);
AT(shoal_message, content, 8);
SIZE(shoal_usage, 12);
AT(shoal_usage, completion_tokens, 8);
SIZE(shoal_agent, 72);
AT(shoal_agent, energy, 12);
AT(shoal_agent, holds, 16);
AT(shoal_agent, bites, 40);
AT(shoal_agent, reward, 48);
AT(shoal_agent, fitness, 64);
VALUE(SHOAL_OK, 0);
VALUE(SHOAL_ERR_USAGE, -1);
VALUE(SHOAL_ERR_IO, -2);
VALUE(SHOAL_ERR_FORMAT, -3);
VALUE(SHOAL_ERR_MISMATCH, -4);
VALUE(SHOAL_ERR_MEMORY, -5);
VALUE(SHOAL_ERR_MISSING, -6);
VALUE(SHOAL_ERR_STATE, -7);
VALUE(SHOAL_ERR_NUMERIC, -8);
VALUE(SHOAL_MOVE_NORTH, 0);
VALUE(SHOAL_MOVE_WEST, 3);
VALUE(SHOAL_PICK_FOOD, 4);
VALUE(SHOAL_DROP_FOOD, 5);
VALUE(SHOAL_ACTIONS, 6);

int main(void) {
    return shoal_version()[0] == 0;
}
