/*
 * address: of a client, and how it becomes known when a proxy is between. Addresses are 16 bytes,
 * IPv4 mapped into IPv6 (::ffff:a.b.c.d), so that both are compared in one way.
 */
#ifndef SHOAL_SERVE_ADDRESS_H
#define SHOAL_SERVE_ADDRESS_H

#include "base/base.h"

struct sockaddr;
struct ip_address {
    uint8_t b[16];
};
enum { IP_ADDRESS_TEXT_LEN = 56 };
/* "1.2.3.4", "::1", "[::1]", each perhaps with ":PORT" ("::1" without); nothing else around it. */
bool ip_address_parse(const char *text, size_t n, struct ip_address *out);
bool ip_address_from_sockaddr(const struct sockaddr *a, struct ip_address *out);
bool ip_address_is_loopback(const struct ip_address *a);
void ip_address_format(const struct ip_address *a, char out[IP_ADDRESS_TEXT_LEN]);
/* The name under which a client's limits are kept: its address, of IPv6 the network of 64 bits that
 * one subscriber has. */
void ip_address_client_key(const struct ip_address *a, char out[IP_ADDRESS_TEXT_LEN]);

/* Addresses that begin alike: "10.0.0.0/8", or one address. */
struct ip_cidr {
    struct ip_address first;
    int bits; /* of 128 */
};
int ip_cidr_parse(const char *text, struct ip_cidr *out, struct error *err);
bool ip_address_in_cidrs(const struct ip_address *a, const struct ip_cidr *blocks, int n);

/* The client of a list as X-Forwarded-For has it: each proxy has appended the address that it was
 * sent from, so the last one that is no trusted proxy is the client; where all are, the first.
 * False where the list does not say: it is empty, or a trusted proxy has written no address. */
bool ip_address_from_forwarded(const char *list, const struct ip_cidr *trusted, int n,
                       struct ip_address *out);

/* Whether the value of a Host header is an IP address, or `name`, with or without a port. */
bool host_header_is_ip(const char *host);
bool host_header_is(const char *host, const char *name);

#endif
