/*
 * test_emulated_bf16: avx512bf16.c with emulated instructions, instead of amx*.c: the tests of
 * test_emulated.c.
 */
#define EMULATED_AVX512BF16
#include "test_emulated.c"
