/* The files of a box, opened inside it, so that a link can only lead to another place in it. */
#include "box.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#define MAX_FOUND 200000 /* entries held while sorting, so that a flood of files cannot use up the agent's memory */

static const struct box *box_;

void files_begin(const struct box *box) { box_ = box; }

static void fail(uint32_t id) { say_error(id, errno, strerror(errno)); }
static void malformed(uint32_t id) { say_error(id, EINVAL, "a path cannot contain a NUL byte"); }

/* The path inside the box, from its working folder; 0 when it is too long. */
static int whole(char out[PATH_MAX], const char *path) {
    int n = path[0] == '/' ? snprintf(out, PATH_MAX, "%s", path) : snprintf(out, PATH_MAX, "%s/%s", box_->workdir, path);
    if (n < PATH_MAX) return 1;
    errno = ENAMETOOLONG;
    return 0;
}

/* Never through a magic link: our own descriptors are no part of the box. */
static int open_inside(const char *path, int flags, mode_t mode) {
    struct { uint64_t flags, mode, resolve; } how = {(uint64_t)(flags | O_CLOEXEC), flags & O_CREAT ? mode : 0, 2 /* RESOLVE_NO_MAGICLINKS */};
    return (int)syscall(437 /* openat2 */, AT_FDCWD, path, &how, sizeof how);
}

/* Errno words of our own for what is no regular file. */
static int refuse_special(uint32_t id, int fd) {
    struct stat s;
    if (fstat(fd, &s) < 0) { fail(id); return 1; }
    if (S_ISDIR(s.st_mode)) { say_error(id, EISDIR, strerror(EISDIR)); return 1; }
    if (!S_ISREG(s.st_mode)) { say_error(id, EINVAL, "not a regular file"); return 1; }
    return 0;
}

void file_read(uint32_t id, struct cursor body) {
    char full[PATH_MAX];
    uint64_t limit = get_u64(&body);
    char *path = get_string(&body);
    if (!path) { malformed(id); return; }
    if (limit > MAX_BODY / 2) { say_error(id, EINVAL, "a file is read in one piece of at most 32 MiB"); return; }
    int fd = whole(full, path) ? open_inside(full, O_RDONLY | O_NONBLOCK, 0) : -1;
    if (fd < 0) { fail(id); return; }
    if (!refuse_special(id, fd)) {
        struct buffer data = {0};
        static uint8_t chunk[1 << 16];
        ssize_t n;
        /* By chunks until the end, because files of /proc say they are empty. */
        while (data.size <= limit && (n = read(fd, chunk, sizeof chunk)) != 0) {
            if (n < 0 && errno == EINTR) continue;
            if (n < 0) break;
            put(&data, chunk, (size_t)n);
        }
        if (data.size > limit) {
            char words[64];
            snprintf(words, sizeof words, "larger than %llu bytes", (unsigned long long)limit);
            say_error(id, EFBIG, words);
        } else if (n < 0) fail(id);
        else say(id, SAY_OK, data.data, data.size);
        drop(&data);
    }
    close(fd);
}

static int make_parents(char *full) {
    for (char *slash = strchr(full + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        int failed = mkdir(full, 0755) < 0 && errno != EEXIST && errno != EROFS && errno != EACCES;
        *slash = '/';
        if (failed) return 0;
    }
    return 1;
}

/* 1 written; 0 and the error said. */
static int write_whole(uint32_t id, const char *path, uint32_t asked, int is_append, const uint8_t *data, size_t size) {
    char full[PATH_MAX];
    int flags = O_WRONLY | O_CREAT | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
    mode_t mode = asked ? asked : 0644; /* not asked for: what the file has, or the usual for a new one */
    if (!whole(full, path)) { fail(id); return 0; }
    int fd = open_inside(full, flags, mode);
    if (fd < 0 && errno == ENOENT && make_parents(full)) fd = open_inside(full, flags, mode);
    if (fd < 0) { fail(id); return 0; }
    int done = 0;
    if (!refuse_special(id, fd)) {
        done = is_append ? lseek(fd, 0, SEEK_END) >= 0 : ftruncate(fd, 0) == 0;
        while (done && size) {
            ssize_t n = write(fd, data, size);
            if (n < 0 && errno == EINTR) continue;
            if (n < 0) { done = 0; break; }
            data += n;
            size -= (size_t)n;
        }
        struct stat s;
        if (done && asked && !is_append && fstat(fd, &s) == 0 && (s.st_mode & 07777) != mode && fchmod(fd, mode) < 0) done = 0;
        if (!done) fail(id);
    }
    close(fd);
    return done;
}

void file_write(uint32_t id, struct cursor body) {
    uint32_t mode = get_u32(&body), is_append = get_u32(&body);
    char *path = get_string(&body);
    if (!path) { malformed(id); return; }
    if (write_whole(id, path, mode & 07777, (int)is_append, body.at, (size_t)(body.end - body.at))) say(id, SAY_OK, NULL, 0);
}

void file_world(uint32_t id, struct cursor body) {
    for (uint32_t num = get_u32(&body); num && !body.bad; num--) {
        char *path = get_string(&body);
        uint32_t size;
        const uint8_t *data = get_text(&body, &size);
        if (!path || body.bad) { malformed(id); return; }
        if (!write_whole(id, path, 0, 0, data, size)) return;
    }
    if (body.bad) malformed(id);
    else say(id, SAY_OK, NULL, 0);
}

struct names { char **all; size_t num, room; };

static void add_name(struct names *n, const char *folder, const char *name, const char *end) {
    if (n->num == n->room) {
        n->room = n->room ? n->room * 2 : 64;
        char **grown = realloc(n->all, n->room * sizeof *grown);
        if (!grown) _exit(70);
        n->all = grown;
    }
    if (asprintf(&n->all[n->num++], "%s%s%s", folder, name, end) < 0) _exit(70);
}

static void drop_names(struct names *n) {
    while (n->num) free(n->all[--n->num]);
    free(n->all);
}

static int by_bytes(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static int kind_of(int folder_fd, const struct dirent *e) {
    struct stat s;
    if (e->d_type != DT_UNKNOWN) return e->d_type;
    if (fstatat(folder_fd, e->d_name, &s, AT_SYMLINK_NOFOLLOW) < 0) return DT_UNKNOWN;
    return S_ISDIR(s.st_mode) ? DT_DIR : S_ISREG(s.st_mode) ? DT_REG : S_ISLNK(s.st_mode) ? DT_LNK : DT_CHR;
}

static int is_dots(const char *name) { return name[0] == '.' && (!name[1] || (name[1] == '.' && !name[2])); }

void file_list(uint32_t id, struct cursor body) {
    char top[PATH_MAX], full[2 * PATH_MAX];
    uint32_t most = get_u32(&body);
    char *path = get_string(&body);
    if (!path) { malformed(id); return; }
    int fd = whole(top, path) ? open_inside(top, O_RDONLY | O_DIRECTORY, 0) : -1;
    if (fd < 0) { fail(id); return; }
    close(fd);
    struct names found = {0}, folders = {0};
    add_name(&folders, "", "", "");
    while (folders.num && found.num < MAX_FOUND) {
        char *folder = folders.all[--folders.num];
        snprintf(full, sizeof full, "%s/%s", top, folder);
        /* Removed meanwhile, closed to its own user, or nested deeper than a path can say: passed over. */
        fd = open_inside(full, O_RDONLY | O_DIRECTORY | O_NOFOLLOW, 0);
        DIR *entries = fd < 0 ? NULL : fdopendir(fd);
        for (struct dirent *e; entries && (e = readdir(entries)) && found.num + folders.num < MAX_FOUND;) {
            if (is_dots(e->d_name)) continue;
            int kind = kind_of(fd, e);
            if (kind == DT_DIR) add_name(&folders, folder, e->d_name, "/");
            else if (kind == DT_REG) add_name(&found, folder, e->d_name, "");
        }
        if (entries) closedir(entries);
        else if (fd >= 0) close(fd);
        free(folder);
    }
    if (found.num) qsort(found.all, found.num, sizeof *found.all, by_bytes);
    struct buffer data = {0};
    for (size_t i = 0; i < found.num && i < most; i++) put_text(&data, found.all[i], strlen(found.all[i]));
    say(id, SAY_OK, data.data, data.size);
    drop(&data);
    drop_names(&found);
    drop_names(&folders);
}

void file_stat(uint32_t id, struct cursor body) {
    char full[PATH_MAX], target[PATH_MAX];
    struct stat s;
    char *path = get_string(&body);
    if (!path) { malformed(id); return; }
    int fd = whole(full, path) ? open_inside(full, O_PATH | O_NOFOLLOW, 0) : -1;
    if (fd < 0) { fail(id); return; }
    if (fstat(fd, &s) < 0) { fail(id); close(fd); return; }
    ssize_t n = S_ISLNK(s.st_mode) ? readlinkat(fd, "", target, sizeof target) : 0;
    close(fd);
    struct buffer data = {0};
    put_u32(&data, S_ISREG(s.st_mode) ? 0 : S_ISDIR(s.st_mode) ? 1 : S_ISLNK(s.st_mode) ? 2 : 3);
    put_u32(&data, s.st_mode & 07777);
    put_u64(&data, (uint64_t)s.st_size);
    put_f64(&data, (double)s.st_mtim.tv_sec + (double)s.st_mtim.tv_nsec / 1e9);
    put_text(&data, target, n > 0 ? (size_t)n : 0);
    say(id, SAY_OK, data.data, data.size);
    drop(&data);
}

#define MAX_CHANGES_BYTES (MAX_BODY / 2) /* a frame longer than the owner takes would end the box */

struct changes { struct buffer data; uint32_t num, most; };

static void add_change(struct changes *c, int is_removed, const char *path) {
    if (c->data.size > MAX_CHANGES_BYTES) c->num = c->most;
    if (c->num == c->most) return;
    c->num++;
    put_u32(&c->data, (uint32_t)is_removed);
    put_text(&c->data, path, strlen(path));
}

/* Whether a folder was made here: the kernel notes on those it merely copied up where they came from. */
static int is_made_here(int fd) {
    static const char *const names[][2] = {{"user.overlay.opaque", "user.overlay.origin"}, {"trusted.overlay.opaque", "trusted.overlay.origin"}};
    char mark;
    for (int i = 0; i < 2; i++) {
        if (fgetxattr(fd, names[i][0], &mark, 1) == 1 && mark == 'y') return 1;
        if (fgetxattr(fd, names[i][1], NULL, 0) >= 0) return 0;
        if (errno != ENODATA && errno != EOPNOTSUPP) return 0;
    }
    return 1;
}

static void walk_layer(struct changes *c, int fd, const char *path, int is_new) {
    DIR *entries = fdopendir(fd);
    if (!entries) { close(fd); return; }
    for (struct dirent *e; (e = readdir(entries)) && c->num < c->most;) {
        char below[PATH_MAX];
        struct stat s;
        if (is_dots(e->d_name) || snprintf(below, sizeof below, "%s/%s", path, e->d_name) >= PATH_MAX) continue;
        if (fstatat(fd, e->d_name, &s, AT_SYMLINK_NOFOLLOW) < 0) continue;
        if (S_ISCHR(s.st_mode) && s.st_rdev == makedev(0, 0)) { add_change(c, 1, below); continue; }
        if (!S_ISDIR(s.st_mode)) { add_change(c, 0, below); continue; }
        int inner = openat(fd, e->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (inner < 0) { add_change(c, 0, below); continue; } /* closed to its own user: what it holds cannot be told, that it is there can */
        int made = is_new || is_made_here(inner);
        if (made) add_change(c, 0, below);
        walk_layer(c, inner, below, made);
    }
    closedir(entries);
}

void file_diff(uint32_t id, struct cursor body) {
    struct changes c = {.most = get_u32(&body)};
    if (box_->upper_fd < 0) { say_error(id, ENOTSUP, "this box does not know what it was made from"); return; }
    int fd = openat(box_->upper_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) { fail(id); return; }
    walk_layer(&c, fd, "", 0);
    say(id, SAY_OK, c.data.data, c.data.size);
    drop(&c.data);
}

void list_processes(uint32_t id) {
    DIR *entries = opendir("/proc");
    if (!entries) { fail(id); return; }
    struct buffer data = {0};
    for (struct dirent *e; (e = readdir(entries));) {
        char *end, name[64], line[256];
        long pid = strtol(e->d_name, &end, 10);
        if (*end || pid <= 1 || pid == getpid() || pid == nursery_pid()) continue;
        snprintf(name, sizeof name, "/proc/%ld/cmdline", pid);
        int fd = open(name, O_RDONLY | O_CLOEXEC);
        ssize_t n = fd < 0 ? 0 : read(fd, line, sizeof line);
        if (fd >= 0) close(fd);
        for (ssize_t i = 0; i < n; i++) if (!line[i]) line[i] = ' ';
        while (n > 0 && line[n - 1] == ' ') n--;
        put_u32(&data, (uint32_t)pid);
        put_text(&data, line, n > 0 ? (size_t)n : 0);
    }
    closedir(entries);
    say(id, SAY_OK, data.data, data.size);
    drop(&data);
}
