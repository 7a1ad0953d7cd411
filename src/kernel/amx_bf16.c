/*
 * amx_bf16: the fast class of the AMX level: tiles_*.h with TDPBF16PS.
 */
#include "kernel/amx.h"

#include "kernel/tiles_attention.h"
#include "kernel/tiles_grad.h"
#include "kernel/tiles_product.h"

void amx_fill_bf16(struct kernels *k) {
    tiles_fill_product(k);
    tiles_fill_grad(k);
    tiles_fill_attention(k);
}
