/* Buffers and cursors: no policy, no system calls but the clock. Memory that cannot be had ends the process. */
#include "box.h"
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

void put(struct buffer *b, const void *data, size_t size) {
    if (b->size + size > b->room) {
        size_t room = b->room ? b->room : 256;
        while (room < b->size + size) room *= 2;
        uint8_t *grown = realloc(b->data, room);
        if (!grown) _exit(70);
        b->data = grown;
        b->room = room;
    }
    if (size) memcpy(b->data + b->size, data, size);
    b->size += size;
}

void put_u32(struct buffer *b, uint32_t v) { put(b, &v, 4); }
void put_u64(struct buffer *b, uint64_t v) { put(b, &v, 8); }
void put_f64(struct buffer *b, double v) { put(b, &v, 8); }
void put_text(struct buffer *b, const void *data, size_t size) { put_u32(b, (uint32_t)size); put(b, data, size); }
void drop(struct buffer *b) { free(b->data); b->data = NULL; b->size = b->room = 0; }

static const uint8_t *take(struct cursor *c, size_t size) {
    static const uint8_t zeros[8];
    if (c->bad || (size_t)(c->end - c->at) < size) { c->bad = 1; return zeros; }
    const uint8_t *here = c->at;
    c->at += size;
    return here;
}

uint16_t get_u16(struct cursor *c) { uint16_t v; memcpy(&v, take(c, 2), 2); return v; }
uint32_t get_u32(struct cursor *c) { uint32_t v; memcpy(&v, take(c, 4), 4); return v; }
uint64_t get_u64(struct cursor *c) { uint64_t v; memcpy(&v, take(c, 8), 8); return v; }
double get_f64(struct cursor *c) { double v; memcpy(&v, take(c, 8), 8); return v; }

const uint8_t *get_text(struct cursor *c, uint32_t *size) {
    *size = get_u32(c);
    if (c->bad || (size_t)(c->end - c->at) < *size) { c->bad = 1; *size = 0; return c->end; }
    const uint8_t *here = c->at;
    c->at += *size;
    return here;
}

char *get_string(struct cursor *c) {
    uint32_t size;
    uint8_t *text = (uint8_t *)get_text(c, &size);
    if (c->bad || memchr(text, 0, size)) return NULL;
    char *start = (char *)text - 1; /* over the last byte of its length, which has been read */
    memmove(start, text, size);
    start[size] = 0;
    return start;
}

double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}
