/*
 * amx: the AMX level: the permission to use tiles, and the function that sets its slots.
 *
 * A tile step multiplies up to 16 rows by one panel of 16 outputs. The int8 products (amx_int8.c)
 * belong to the exact class, the bf16 products and attention (amx_bf16.c) to the fast class. The remaining slots are those of the AVX-512 level.
 */
#include <sys/syscall.h>
#include <unistd.h>

#include "kernel/amx.h"

enum {
    XFEATURE_TILE_DATA = 18,
    REQUEST_PERMISSION = 0x1023, /* ARCH_REQ_XCOMP_PERM */
};

_Thread_local uint32_t amx_configured;

bool amx_request(void) {
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, XFEATURE_TILE_DATA) == 0;
}

void kernels_fill_amx(struct kernels *k) {
    amx_fill_int8(k);
    amx_fill_bf16(k);
    k->quantized_tiles = true;
}
