/*
 * defaults: the values of epochs, lr, bsz and grad_accum that the user left at 0.
 *
 * For supervised fine-tuning they follow from the number of samples and the model's width:
 *
 * - an update has a tenth of the samples, at least 4 and at most 16, but not more than there are;
 * - epochs make at least 200 updates, but not more than 10 passes over the data;
 * - the learning rate is 10 · 5e-5 · (2000 / width)^0.78, which Schulman et al. ("LoRA Without
 *   Regret", 2025) fitted to the best rates of LoRA over models of many sizes.
 *
 * So some dozens of samples are learned, and a large file is read once. Other methods have fixed
 * values.
 */
#include "train/train.h"

#include <math.h>

enum { MIN_BATCH = 4, MAX_BATCH = 16, MIN_UPDATES = 200, MAX_EPOCHS = 10 };

/* Two significant digits, so that the value in a message is the value that is used. */
static double round_digits(double x) {
    double unit = 1e-9;
    while (x / unit >= 100) unit *= 10;
    return floor(x / unit + 0.5) * unit;
}

void train_options_adapt(struct train_options *o, int64_t n, int32_t width) {
    int64_t batch = MIN(MAX(MIN(n / 10, MAX_BATCH), MIN_BATCH), n);
    if (o->bsz == 0 && o->grad_accum == 0) o->grad_accum = 1;
    if (o->bsz == 0) o->bsz = MAX(batch / o->grad_accum, 1);
    if (o->grad_accum == 0) o->grad_accum = MAX(batch / o->bsz, 1);
    if (o->lr == 0) o->lr = round_digits(5e-4 * math_pow(2000.0 / width, 0.78));
    if (o->epochs > 0) return;
    double passes = (double)(MIN_UPDATES * o->bsz * o->grad_accum) / (double)n;
    o->epochs = passes < 1 ? 1 : passes > MAX_EPOCHS ? MAX_EPOCHS : ceil(passes);
}

void train_options_fix(struct train_options *o) {
    if (o->bsz == 0) o->bsz = 1;
    if (o->grad_accum == 0) o->grad_accum = 16;
    if (o->lr == 0) o->lr = 2e-4;
    if (o->epochs == 0) o->epochs = 1;
}
