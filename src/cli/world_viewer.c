/*
 * world_viewer: see world_viewer.h. It uses escape sequences and no library.
 *
 * Invariant: while `screen.on`, the terminal is in the viewer's mode. screen_leave is called at the
 * end, by exit(), and by signals that end the program, which are raised again afterwards.
 */
#define _GNU_SOURCE
#include "cli/world_viewer.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

static const double speeds[] = {1, 2, 5, 10, 20, 50, 100, 200, 500, 1000}; /* ticks a second */
enum { SPEED_FIRST = 3, SEEK = 10, BAR = 10 };

/* navigation */

int world_viewer_step(struct world_viewer *v, struct error *err) {
    if (v->w->tick < v->t->n_ticks) {
        trace_seek(v->t, v->w, v->w->tick + 1);
        return 1;
    }
    return v->step ? v->step(v->ctx, err) : 0;
}

int world_viewer_seek(struct world_viewer *v, int64_t tick, struct error *err) {
    int rc = 1;
    tick = MAX(tick, 0);
    if (tick <= v->t->n_ticks)
        trace_seek(v->t, v->w, tick);
    else
        while (rc > 0 && v->w->tick < tick) rc = world_viewer_step(v, err);
    return MIN(rc, 0);
}

int world_viewer_key(struct world_viewer *v, int key, struct error *err) {
    int n = v->w->n_agents;
    switch (key) {
    case ' ':
        v->paused = !v->paused;
        return OK;
    case '.':
        v->paused = true;
        return world_viewer_seek(v, v->w->tick + 1, err);
    case '<':
    case ',':
        return world_viewer_seek(v, v->w->tick - SEEK, err);
    case '>':
        return world_viewer_seek(v, v->w->tick + SEEK, err);
    case '+':
    case '=':
        v->speed = MIN(v->speed + 1, (int)ARRAY_LEN(speeds) - 1);
        return OK;
    case '-':
        v->speed = MAX(v->speed - 1, 0);
        return OK;
    case 'n':
    case 'p':
        v->agent = (v->agent + (key == 'n' ? 1 : n - 1)) % n;
        return OK;
    case 'q':
    case 3: /* Ctrl-C */
        v->quit = true;
        return OK;
    default:
        return OK;
    }
}

/* frame */

static void add_status(const struct world_viewer *v, struct buf *out) {
    const struct world *w = v->w;
    int64_t delivered = 0, built = 0;
    for (int i = 0; i < w->n_agents; i++) {
        delivered += w->agents[i].delivered;
        built += w->agents[i].built;
    }
    buf_printf(out, "tick %d of %lld  seed %llu  %s  %d of %d live  %lld delivered", w->tick,
               (long long)v->t->steps, (unsigned long long)w->seed, v->t->policy, w->n_living,
               w->n_agents, (long long)delivered);
    if (built) buf_printf(out, "  %lld built", (long long)built);
    buf_printf(out, "  %.0f/s%s\n", speeds[v->speed], v->paused ? "  paused" : "");
}

/* "A0  ######.... 120" */
static void add_bar(const struct world_viewer *v, int i, struct buf *out) {
    const struct world_agent *a = &v->w->agents[i];
    int full = (int)((a->energy * (int64_t)BAR + v->t->rules.energy - 1) / v->t->rules.energy);
    buf_printf(out, "%c%c%-2d ", i == v->agent ? '>' : ' ', world_agent_letter(i), i);
    for (int k = 0; k < BAR; k++) buf_puts(out, k < full ? "#" : ".");
    buf_printf(out, " %-5d%s", a->energy, a->holds == HOLDS_FOOD ? "f" : a->holds ? "m" : " ");
}

static void add_map_row(const struct world_viewer *v, const char *map, int row, bool ansi,
                        struct buf *out) {
    const struct world *w = v->w;
    const struct world_agent *a = &w->agents[v->agent];
    const char *cells = map + row * (w->size + 1);
    bool selected = ansi && a->alive && row == w->size - 1 - a->cell / w->size;
    int x = selected ? a->cell % w->size : w->size;
    buf_add(out, cells, (size_t)x);
    if (selected) {
        buf_printf(out, "\033[7m%c\033[0m", world_agent_letter(v->agent));
        buf_add(out, cells + x + 1, (size_t)(w->size - x - 1));
    }
}

static void add_rows(const struct world_viewer *v, bool ansi, struct buf *out) {
    struct buf map = {0};
    int size = v->w->size;
    world_render(v->w, &map);
    for (int row = 0; row < size; row++) {
        add_map_row(v, map.data, row, ansi, out);
        buf_puts(out, "  ");
        for (int i = row; i < v->w->n_agents; i += size) add_bar(v, i, out);
        while (out->data[out->len - 1] == ' ') out->data[--out->len] = 0;
        buf_puts(out, "\n");
    }
    buf_release(&map);
}

static void add_selected(const struct world_viewer *v, struct buf *out) {
    const struct world_agent *a = &v->w->agents[v->agent];
    buf_printf(out, "agent_%d: %s, %d collected, %d delivered, total reward %.1f\n", v->agent,
               a->alive ? "alive" : "dead", a->collected, a->delivered, a->episode_reward);
    buf_puts(out, "sees:   ");
    world_observe(v->w, &v->t->rules, v->agent, out);
    buf_puts(out, "\nprompt: ");
    world_prompt(v->w, &v->t->rules, v->agent, out);
    buf_printf(out, "\ndid:    %s, reward %.1f\n",
               a->last_actions[1] >= 0 ? world_action_names[a->last_actions[1]] : "nothing yet",
               a->reward);
    if (v->describe && v->w->tick == v->t->n_ticks && v->w->tick > 0)
        v->describe(v->ctx, v->agent, out);
}

/* Removes control characters, because an agent's text may contain any character. */
static void add_selected_clean(const struct world_viewer *v, struct buf *out) {
    struct buf b = {0};
    add_selected(v, &b);
    buf_add_terminal(out, b.data, b.len);
    buf_release(&b);
}

void world_viewer_render(const struct world_viewer *v, bool ansi, struct buf *out) {
    add_status(v, out);
    add_rows(v, ansi, out);
    (ansi ? add_selected_clean : add_selected)(v, out);
}

/* terminal */

static struct {
    volatile sig_atomic_t on;
    struct termios saved;
    bool keys; /* stdin is a terminal too */
} screen;

static const char ENTER[] =
    "\033[?1049h\033[?25l\033[?7l\033[2J", /* alternate screen, no cursor, no wrap */
    LEAVE[] = "\033[?7h\033[?25h\033[?1049l";
static const int fatal_signals[] = {SIGINT,  SIGTERM, SIGHUP, SIGQUIT, SIGABRT,
                                    SIGSEGV, SIGBUS,  SIGFPE, SIGILL,  SIGTSTP};

/* May run in a signal handler. */
static void screen_leave(void) {
    if (!screen.on) return;
    screen.on = 0;
    ssize_t n = write(STDOUT_FILENO, LEAVE, sizeof LEAVE - 1);
    (void)n;
    if (screen.keys) tcsetattr(STDIN_FILENO, TCSANOW, &screen.saved);
}

static struct sigaction saved_actions[ARRAY_LEN(fatal_signals)];

/* Restores the terminal. A fault then occurs again and runs the previous handler; any other signal
 * is raised again and ends or stops the program. */
static void on_fatal_signal(int sig, siginfo_t *info, void *context) {
    bool fault = sig == SIGSEGV || sig == SIGBUS || sig == SIGFPE || sig == SIGILL;
    (void)context;
    screen_leave();
    signal(sig, SIG_DFL);
    for (size_t i = 0; fault && i < ARRAY_LEN(fatal_signals); i++)
        if (fatal_signals[i] == sig) sigaction(sig, &saved_actions[i], NULL);
    if (!fault || info->si_code <= 0 || info->si_code == SI_KERNEL)
        raise(sig); /* blocked while its handler runs */
}

static void screen_enter(void) {
    static bool registered;
    struct sigaction act = {.sa_sigaction = on_fatal_signal, .sa_flags = SA_SIGINFO}, old;
    screen.keys = isatty(STDIN_FILENO) && tcgetattr(STDIN_FILENO, &screen.saved) == 0;
    if (!registered) registered = atexit(screen_leave) == 0;
    for (size_t i = 0; i < ARRAY_LEN(fatal_signals); i++)
        if (sigaction(fatal_signals[i], &act, &old) == 0 && old.sa_sigaction != on_fatal_signal)
            saved_actions[i] = old;
    screen.on = 1;
    if (screen.keys) {
        struct termios raw = screen.saved;
        raw.c_lflag &= ~(tcflag_t)(ICANON | ECHO | ISIG);
        tcsetattr(STDIN_FILENO, TCSANOW, &raw);
    }
    terminal_write_raw(ENTER);
}

static int screen_rows(void) {
    struct winsize w;
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &w) == 0 && w.ws_row > 1 ? w.ws_row : 24;
}

/* Prints the lines that fit on the screen, and clears the rest of each line. */
static void screen_show(const struct world_viewer *v) {
    struct buf b = {0}, frame = {0};
    int row = 0, rows = screen_rows();
    world_viewer_render(v, true, &b);
    buf_puts(&b, "space pause  . one tick  < > ten  n p agent  + - speed  q quit");
    buf_puts(&frame, "\033[H");
    for (char *rest = b.data, *line; row < rows && (line = strsep(&rest, "\n")); row++)
        buf_printf(&frame, "%s%s\033[K", row ? "\r\n" : "", line);
    buf_puts(&frame, "\033[J");
    terminal_write_raw(frame.data);
    buf_release(&frame);
    buf_release(&b);
}

/* Handles keys. Arrows are escape sequences: up and down change the speed, left and right move ten
 * ticks. */
static int keys_handle(struct world_viewer *v, const char *keys, ssize_t n, struct error *err) {
    int rc = OK;
    for (ssize_t i = 0; rc == OK && i < n; i++) {
        int key = (unsigned char)keys[i];
        if (key == '\033' && i + 2 < n && (keys[i + 1] == '[' || keys[i + 1] == 'O')) {
            static const char arrows[] = "+->< "; /* A, B, C, D */
            char letter = keys[i += 2];
            key = letter >= 'A' && letter <= 'D' ? arrows[letter - 'A'] : 0;
        }
        rc = world_viewer_key(v, key, err);
    }
    return rc;
}

/* Waits for keys until a time and handles them. */
static int keys_wait(struct world_viewer *v, double until, struct error *err) {
    char keys[64];
    double left = until - clock_now();
    struct pollfd p = {.fd = screen.keys ? STDIN_FILENO : -1, .events = POLLIN};
    int ready = poll(&p, 1, left > 0 ? (int)(left * 1000) + 1 : 0);
    if (ready <= 0) return OK;
    ssize_t n = read(STDIN_FILENO, keys, sizeof keys);
    if (n <= 0 && errno != EINTR) v->quit = true; /* the terminal is closed */
    return keys_handle(v, keys, n, err);
}

static int watch_terminal(struct world_viewer *v, struct error *err) {
    int rc = OK;
    double next = clock_now();
    while (rc >= 0 && !v->quit) {
        if (!screen.on) screen_enter(); /* also after a stop (Ctrl-Z) */
        screen_show(v);
        rc = keys_wait(v, v->paused ? clock_now() + 60 : next, err);
        if (rc < 0 || v->paused || clock_now() < next) continue;
        rc = world_viewer_step(v, err);
        if (rc == 0 && screen.keys) v->paused = true;
        if (rc == 0 && !screen.keys) v->quit = true;
        next = MAX(next, clock_now() - 1) + 1 / speeds[v->speed];
    }
    screen_leave();
    return MIN(rc, 0);
}

int world_viewer_run(struct world_viewer *v, struct error *err) {
    bool terminal = isatty(STDOUT_FILENO) == 1;
    struct buf b = {0};
    int rc = 1;
    v->speed = SPEED_FIRST;
    if (terminal)
        rc = watch_terminal(v, err);
    else
        while (rc > 0) rc = world_viewer_step(v, err);
    world_viewer_render(v, false, &b);
    if (rc >= 0) fputs(b.data, stdout);
    buf_release(&b);
    return rc;
}
