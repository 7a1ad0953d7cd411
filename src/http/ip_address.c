/* ip_address: converts addresses from text to bytes and back. A text is an address only if the
 * whole text can be parsed. */
#define _GNU_SOURCE
#include "http/http.h"

#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>

static const uint8_t MAPPED[12] = {[10] = 0xff, [11] = 0xff};

static bool is_v4(const struct ip_address *a) {
    return memcmp(a->b, MAPPED, sizeof MAPPED) == 0;
}

static void v4_to_mapped(struct ip_address *out, const struct in_addr *a) {
    memcpy(out->b, MAPPED, sizeof MAPPED);
    memcpy(out->b + sizeof MAPPED, a, 4);
}

/* The length of a host without its port; a port is a colon and digits. An IPv6 address without
 * brackets contains colons, so it cannot have a port. */
static size_t host_length(const char *text, size_t n) {
    const char *colon = memrchr(text, ':', n);
    if (!colon || (text[0] != '[' && memchr(text, ':', (size_t)(colon - text)))) return n;
    for (const char *p = colon + 1; p < text + n; p++)
        if (*p < '0' || *p > '9') return n;
    return (size_t)(colon - text);
}

bool ip_address_parse(const char *text, size_t n, struct ip_address *out) {
    char address_text[INET6_ADDRSTRLEN];
    struct in_addr v4;
    struct in6_addr v6;
    n = host_length(text, n);
    bool brackets = n >= 2 && text[0] == '[' && text[n - 1] == ']';
    if (brackets) text++, n -= 2;
    if (n == 0 || n >= sizeof address_text || memchr(text, 0, n)) return false;
    memcpy(address_text, text, n);
    address_text[n] = 0;
    if (!brackets && inet_pton(AF_INET, address_text, &v4) == 1)
        v4_to_mapped(out, &v4);
    else if (inet_pton(AF_INET6, address_text, &v6) == 1)
        memcpy(out->b, &v6, sizeof out->b);
    else
        return false;
    return true;
}

bool ip_address_from_sockaddr(const struct sockaddr *a, struct ip_address *out) {
    *out = (struct ip_address){{0}};
    if (a && a->sa_family == AF_INET)
        v4_to_mapped(out, &((const struct sockaddr_in *)(const void *)a)->sin_addr);
    else if (a && a->sa_family == AF_INET6)
        memcpy(out->b, &((const struct sockaddr_in6 *)(const void *)a)->sin6_addr, 16);
    else
        return false;
    return true;
}

bool ip_address_is_loopback(const struct ip_address *a) {
    static const struct ip_address one = {{[15] = 1}};
    return is_v4(a) ? a->b[12] == 127 : memcmp(a, &one, sizeof one) == 0;
}

void ip_address_format(const struct ip_address *a, char out[IP_ADDRESS_TEXT_LEN]) {
    if (is_v4(a))
        inet_ntop(AF_INET, a->b + sizeof MAPPED, out, IP_ADDRESS_TEXT_LEN);
    else
        inet_ntop(AF_INET6, a->b, out, IP_ADDRESS_TEXT_LEN);
}

void ip_address_client_key(const struct ip_address *a, char out[IP_ADDRESS_TEXT_LEN]) {
    struct ip_address net = *a;
    if (!is_v4(a)) memset(net.b + 8, 0, 8);
    ip_address_format(&net, out);
    if (!is_v4(a) && !ip_address_is_loopback(a)) strcat(out, "/64");
}

int ip_cidr_parse(const char *text, struct ip_cidr *out, struct error *err) {
    const char *slash = strchrnul(text, '/');
    char *end = NULL;
    if (!ip_address_parse(text, (size_t)(slash - text), &out->first) || strchr(text, '['))
        return error_set(err, ERR_USAGE, "'%s' is not an IP address or ADDRESS/BITS", text);
    int max_bits = is_v4(&out->first) ? 32 : 128;
    long bits = *slash ? strtol(slash + 1, &end, 10) : max_bits;
    if (*slash && (slash[1] < '0' || slash[1] > '9' || *end || bits > max_bits))
        return error_set(err, ERR_USAGE, "'%s': '/' is followed by 0 to %d bits", text, max_bits);
    out->bits = (int)bits + 128 - max_bits;
    return OK;
}

static bool cidr_contains(const struct ip_cidr *block, const struct ip_address *a) {
    int whole = block->bits / 8, rest = block->bits % 8;
    if (memcmp(a->b, block->first.b, (size_t)whole) != 0) return false;
    return !rest || (a->b[whole] ^ block->first.b[whole]) >> (8 - rest) == 0;
}

bool ip_address_in_cidrs(const struct ip_address *a, const struct ip_cidr *blocks, int n) {
    for (int i = 0; i < n; i++)
        if (cidr_contains(&blocks[i], a)) return true;
    return false;
}

bool ip_address_from_forwarded(const char *list, const struct ip_cidr *trusted, int n,
                               struct ip_address *out) {
    size_t end = strlen(list);
    while (end > 0) {
        const char *comma = memrchr(list, ',', end);
        size_t begin = comma ? (size_t)(comma - list) + 1 : 0, from = begin, to = end;
        while (from < to && (list[from] == ' ' || list[from] == '\t')) from++;
        while (to > from && (list[to - 1] == ' ' || list[to - 1] == '\t')) to--;
        if (!ip_address_parse(list + from, to - from, out)) return false;
        if (!comma || !ip_address_in_cidrs(out, trusted, n)) return true;
        end = begin - 1;
    }
    return false;
}

bool host_header_is_ip(const char *host) {
    struct ip_address a;
    size_t n = strlen(host);
    bool unbracketed_v6 = host[0] != '[' && memchr(host, ':', host_length(host, n));
    return !unbracketed_v6 && ip_address_parse(host, n, &a);
}

bool host_header_is(const char *host, const char *name) {
    size_t n = host_length(host, strlen(host));
    if (n > 1 && host[n - 1] == '.') n--; // the root domain's dot
    return strlen(name) == n && strncasecmp(host, name, n) == 0;
}
