/*
 * address: of a client, and how it becomes known when a proxy is between. Addresses are 16 bytes,
 * IPv4 mapped into IPv6 (::ffff:a.b.c.d), so that both are compared in one way.
 */
#ifndef SHOAL_SERVE_ADDRESS_H
#define SHOAL_SERVE_ADDRESS_H

#include "base/base.h"

struct sockaddr;
struct address {
    uint8_t b[16];
};
enum { ADDRESS_TEXT = 56 };
/* "1.2.3.4", "::1", "[::1]", each perhaps with ":PORT" ("::1" without); nothing else around it. */
bool address_parse(const char *text, size_t n, struct address *out);
bool address_of_socket(const struct sockaddr *a, struct address *out);
bool address_is_loopback(const struct address *a);
void address_text(const struct address *a, char out[ADDRESS_TEXT]);
/* The name under which a client's limits are kept: its address, of IPv6 the network of 64 bits that
 * one subscriber has. */
void address_client(const struct address *a, char out[ADDRESS_TEXT]);

/* Addresses that begin alike: "10.0.0.0/8", or one address. */
struct address_block {
    struct address first;
    int bits; /* of 128 */
};
int address_block_parse(const char *text, struct address_block *out, struct error *err);
bool address_is_in(const struct address *a, const struct address_block *blocks, int n);

/* The client of a list as X-Forwarded-For has it: each proxy has appended the address that it was
 * sent from, so the last one that is no trusted proxy is the client; where all are, the first.
 * False where the list does not say: it is empty, or a trusted proxy has written no address. */
bool address_forwarded(const char *list, const struct address_block *trusted, int n,
                       struct address *out);

/* Whether the value of a Host header is an IP address, or `name`, with or without a port. */
bool host_is_address(const char *host);
bool host_is(const char *host, const char *name);

#endif
