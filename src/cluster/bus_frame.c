/*
 * bus_frame: frames of a local bus as bytes, and their transfer.
 */
#include "cluster/bus_frame.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

enum { HEAD_BYTES = 4, FIXED_BYTES = 1 + 8 + 1, READ_BYTES = 1 << 20 };

static void put_number(uint8_t *p, uint64_t v, int n) {
    for (int i = 0; i < n; i++) p[i] = (uint8_t)(v >> 8 * i);
}

static uint64_t get_number(const uint8_t *p, int n) {
    uint64_t v = 0;
    for (int i = 0; i < n; i++) v |= (uint64_t)p[i] << 8 * i;
    return v;
}

void bus_frame_add(struct buf *out, enum bus_op op, uint64_t number, const char *name,
                   const void *data, size_t len) {
    size_t n = strlen(name);
    uint8_t head[HEAD_BYTES + FIXED_BYTES];
    CHECK(n < BUS_NAME_MAX && len <= BUS_DATA_MAX + 256);
    put_number(head, FIXED_BYTES + n + len, 4);
    head[4] = (uint8_t)op;
    put_number(head + 5, number, 8);
    head[13] = (uint8_t)n;
    buf_add(out, head, sizeof head);
    buf_add(out, name, n);
    if (len) buf_add(out, data, len);
}

int64_t bus_frame_parse(const uint8_t *p, size_t len, struct bus_frame *out) {
    if (len < HEAD_BYTES) return 0;
    uint64_t size = get_number(p, 4);
    if (size < FIXED_BYTES || size > FIXED_BYTES + BUS_NAME_MAX + BUS_DATA_MAX + 256)
        return ERR_FORMAT;
    if (len < HEAD_BYTES + size) return 0;
    size_t n = p[13];
    if (p[4] == 0 || p[4] >= BUS_OPS || n >= BUS_NAME_MAX || FIXED_BYTES + n > size ||
        memchr(p + HEAD_BYTES + FIXED_BYTES, 0, n))
        return ERR_FORMAT;
    out->op = (enum bus_op)p[4];
    out->number = get_number(p + 5, 8);
    memcpy(out->name, p + HEAD_BYTES + FIXED_BYTES, n);
    out->name[n] = 0;
    out->data = p + HEAD_BYTES + FIXED_BYTES + n;
    out->len = size - FIXED_BYTES - n;
    return (int64_t)(HEAD_BYTES + size);
}

int bus_socket_open(const char *name, bool listens, struct error *err) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t n = strlen(name);
    if (n >= sizeof address.sun_path)
        return error_set(err, ERR_USAGE, "'%s' is too long for the name of a socket", name);
    memcpy(address.sun_path, name, n);
    if (*name == '@') address.sun_path[0] = 0;
    const struct sockaddr *to = (const struct sockaddr *)&address;
    socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n + (*name != '@'));
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | (listens ? SOCK_NONBLOCK : 0), 0);
    if (fd < 0) return error_errno(err, "cannot make a socket");
    if (listens ? bind(fd, to, size) == 0 && listen(fd, 128) == 0 : connect(fd, to, size) == 0)
        return fd;
    error_errno(err, listens ? "cannot listen on '%s'" : "cannot join the bus '%s'", name);
    fd_close(&fd);
    return err->code;
}

bool bus_socket_read(int fd, struct buf *in) {
    struct error err;
    if (buf_reserve(in, READ_BYTES, &err) != OK) return false;
    ssize_t n = recv(fd, in->data + in->len, READ_BYTES, MSG_DONTWAIT);
    if (n < 0) return errno == EAGAIN || errno == EINTR;
    in->len += (size_t)n;
    in->data[in->len] = 0;
    return n > 0;
}

bool bus_socket_write(int fd, struct buf *out) {
    while (out->len) {
        ssize_t n = send(fd, out->data, out->len, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0) return errno == EAGAIN || errno == EINTR;
        memmove(out->data, out->data + n, out->len - (size_t)n);
        out->len -= (size_t)n;
    }
    return true;
}
