/*
 * bus_frame: the frames between a member and the hub of a local bus, over a stream socket.
 *
 * A frame is its length (32 bits, little-endian, of all that follows), the operation (a byte), a
 * number (64 bits), the length of the name (a byte), the name, and data to the end.
 */
#ifndef SHOAL_CLUSTER_BUS_FRAME_H
#define SHOAL_CLUSTER_BUS_FRAME_H

#include "cluster/bus.h"

enum bus_op {
    /* from a member; the hub replies to BUS_ENQUEUE */
    BUS_SUBSCRIBE = 1,
    BUS_CONSUME, /* number: the limit */
    BUS_PUBLISH,
    BUS_ENQUEUE, /* data: length of the id (a byte), the id, the item */
    BUS_PURGE,
    BUS_ACK, /* number: the item, also of the next two */
    BUS_NAK,
    BUS_WORKING,
    /* from the hub */
    BUS_MESSAGE,
    BUS_ITEM,  /* number: the item */
    BUS_REPLY, /* number: 0, or an enum error_code as unsigned; data: the message of an error */
    BUS_OPS
};
struct bus_frame {
    enum bus_op op;
    uint64_t number;
    char name[BUS_NAME_MAX];
    const uint8_t *data; /* into the buffer that was parsed */
    size_t len;
};
/* Appends a frame. The name has less than BUS_NAME_MAX bytes, `len` is at most BUS_DATA_MAX + 256.
 */
void bus_frame_add(struct buf *out, enum bus_op op, uint64_t number, const char *name,
                   const void *data, size_t len);
/* Parses the frame that begins at p. Returns its bytes, 0 if it is not complete yet, or
 * ERR_FORMAT. */
int64_t bus_frame_parse(const uint8_t *p, size_t len, struct bus_frame *out);
/* Opens a socket of the name, "@…" (abstract) or a path: one that listens, or one that is
 * connected. Returns the descriptor, or a negative error. */
int bus_socket_open(const char *name, bool listens, struct error *err);
/* Appends the available bytes of a socket, at most 1 MiB, to `in`. False: it is closed or broken.
 */
bool bus_socket_read(int fd, struct buf *in);
/* Writes bytes of `out` until the socket is full, and removes them from `out`. False: it is broken.
 */
bool bus_socket_write(int fd, struct buf *out);

#endif
