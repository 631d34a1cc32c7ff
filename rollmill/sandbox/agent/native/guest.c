/* The first process of a virtual machine: builds the box's root from a read-only disk and a tmpfs, drops its rights, then serves.
 *
 * /box.conf, appended to the initramfs by the owner, says what to build: lines `key=value` ended by NUL bytes. Two serial ports (or two
 * vsock ports) lead out: the agent's frames, and the warden, a thread that keeps root's rights and does one thing, to give a machine
 * that was restored from a snapshot a name, a clock and random numbers of its own.
 */
#include "box.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/random.h>
#include <net/if.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
/* Last: older kernel headers rely on what others define. */
#include <linux/vm_sockets.h>

#define MAX_ENV 256
#define DEVICE_WAIT_S 20.0
#define SEED_BYTES 32

static struct {
    char *hostname, *disk, *root, *workdir, *home, *machine_id;
    unsigned uid, gid, vsock, num_processes;
    char *env[MAX_ENV + 1];
} conf = {.hostname = "localhost", .disk = "67108864", .root = "/dev/vda", .workdir = "/", .home = "/", .machine_id = ""};

static int agent_fd = -1, hostname_fd = -1, machine_id_fd = -1;

/* On the console, where the owner reads the last lines of a machine that did not come up, and to the owner when it listens already. */
static void fail(const char *what) {
    char words[512];
    int number = errno;
    snprintf(words, sizeof words, "cannot %s: %s", what, strerror(number));
    dprintf(2, "\nbox: %s\n", words);
    if (agent_fd >= 0) {
        uint32_t size = (uint32_t)strlen(words), head[5] = {8 + size, 0, SAY_LAST_WORDS, (uint32_t)number, size};
        if (write(agent_fd, head, sizeof head) == sizeof head && write(agent_fd, words, size) < 0) {}
    }
    sync();
    _exit(1); /* the end of PID 1 is a kernel panic, and that ends the machine */
}

static void must(int result, const char *what) { if (result < 0) fail(what); }

static char *slurp(const char *path, size_t *size) {
    struct stat s;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &s) < 0) return NULL;
    char *data = calloc(1, (size_t)s.st_size + 1);
    size_t at = 0;
    for (ssize_t n; data && at < (size_t)s.st_size && (n = read(fd, data + at, (size_t)s.st_size - at)) > 0;) at += (size_t)n;
    close(fd);
    if (size) *size = at;
    return data;
}

static void read_conf(void) {
    size_t size, num_env = 0;
    char *data = slurp("/box.conf", &size);
    if (!data) fail("read /box.conf");
    for (char *line = data; line < data + size; line += strlen(line) + 1) {
        char *value = strchr(line, '=');
        if (!value) continue;
        *value++ = 0;
        if (!strcmp(line, "hostname")) conf.hostname = value;
        else if (!strcmp(line, "machine_id")) conf.machine_id = value;
        else if (!strcmp(line, "disk_bytes")) conf.disk = value;
        else if (!strcmp(line, "root")) conf.root = value;
        else if (!strcmp(line, "workdir")) conf.workdir = value;
        else if (!strcmp(line, "home")) conf.home = value;
        else if (!strcmp(line, "uid")) conf.uid = (unsigned)strtoul(value, NULL, 10);
        else if (!strcmp(line, "gid")) conf.gid = (unsigned)strtoul(value, NULL, 10);
        else if (!strcmp(line, "vsock")) conf.vsock = (unsigned)strtoul(value, NULL, 10);
        else if (!strcmp(line, "num_processes")) conf.num_processes = (unsigned)strtoul(value, NULL, 10);
        else if (!strcmp(line, "env") && num_env < MAX_ENV) conf.env[num_env++] = value;
        line = value;
    }
}

static void load_modules(void) {
    char *list = slurp("/modules.list", NULL), *rest = list;
    for (char *path; list && (path = strsep(&rest, "\n"));) {
        if (!*path) continue;
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0 || (syscall(SYS_finit_module, fd, "", 0) < 0 && errno != EEXIST)) { dprintf(2, "box: module %s\n", path); fail("load a module"); }
        close(fd);
    }
    free(list);
}

/* A setting that not every kernel has. */
static void set(const char *path, const char *value) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd >= 0) { if (write(fd, value, strlen(value)) < 0) {} close(fd); }
}

/* With no swap a full machine would read its programs from disk again and again, for minutes; so that it ends the greediest instead,
 * what was used within the last second stays. */
static void end_thrashing(void) {
    set("/sys/kernel/mm/lru_gen/enabled", "y");
    set("/sys/kernel/mm/lru_gen/min_ttl_ms", "1000");
}

static void nap(void) {
    struct timespec pause = {0, 5000000};
    nanosleep(&pause, NULL);
}

static void mount_disk(void) {
    static const char *const kinds[] = {"erofs", "ext4", "squashfs"};
    for (double end = now_s() + DEVICE_WAIT_S; access(conf.root, F_OK) < 0; nap()) if (now_s() > end) fail("find the disk");
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (!mount(conf.root, "/lower", kinds[i], MS_RDONLY | MS_NODEV, NULL)) return;
    fail("mount the disk");
}

static void mount_in(const char *kind, const char *place, mode_t mode, unsigned long flags, const char *options) {
    if (mkdir(place, mode) < 0 && errno != EEXIST) fail(place);
    must(mount(kind, place, kind, flags, options), place);
}

/* A file of the image that says who the machine is: shown from outside the writable layer, so that it is no change of the box's. */
static int own_file(const char *source, const char *place, const char *text) {
    int fd = open(source, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0) fail(source);
    dprintf(fd, "%s\n", text);
    if (mount(source, place, NULL, MS_BIND, NULL) < 0 && errno != ENOENT) fail(place);
    return fd;
}

static int build_root(void) {
    char options[256];
    mkdir("/lower", 0755);
    mkdir("/layer", 0755);
    mkdir("/root", 0755);
    mount_disk();
    /* A file of one page per inode at most: a box that makes only empty files runs out of names before it runs out of the machine's memory. */
    unsigned long long inodes = strtoull(conf.disk, NULL, 10) / 4096;
    snprintf(options, sizeof options, "mode=755,size=%s,nr_inodes=%llu", conf.disk, inodes < 1024 ? 1024 : inodes);
    must(mount("tmpfs", "/layer", "tmpfs", MS_NODEV, options), "mount the writable layer");
    must(mkdir("/layer/upper", 0755), "make the writable layer");
    must(mkdir("/layer/work", 0755), "make the writable layer");
    must(mount("overlay", "/root", "overlay", MS_NODEV, "lowerdir=/lower,upperdir=/layer/upper,workdir=/layer/work"), "stack the layers");
    int upper = open("/layer/upper", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    must(upper, "open the writable layer");
    hostname_fd = own_file("/hostname", "/root/etc/hostname", conf.hostname);
    machine_id_fd = own_file("/machine-id", "/root/etc/machine-id", conf.machine_id);
    mount_in("proc", "/root/proc", 0555, MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    mount_in("sysfs", "/root/sys", 0555, MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY, NULL);
    mount_in("devtmpfs", "/root/dev", 0755, MS_NOSUID | MS_NOEXEC, "mode=755");
    mount_in("devpts", "/root/dev/pts", 0755, MS_NOSUID | MS_NOEXEC, "mode=620,ptmxmode=666,gid=5");
    mount_in("tmpfs", "/root/dev/shm", 01777, MS_NOSUID | MS_NODEV, "mode=1777");
    return upper;
}

static void make_links(void) {
    static const char *const links[][2] = {
        {"/proc/self/fd", "/dev/fd"}, {"fd/0", "/dev/stdin"}, {"fd/1", "/dev/stdout"}, {"fd/2", "/dev/stderr"}, {"pts/ptmx", "/dev/ptmx"}};
    unlink("/dev/ptmx"); /* the node of devtmpfs is root's alone */
    for (size_t i = 0; i < sizeof links / sizeof *links; i++) if (symlink(links[i][0], links[i][1]) < 0 && errno != EEXIST) fail(links[i][1]);
}

static void raise_loopback(void) {
    struct ifreq r = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return;
    if (ioctl(fd, SIOCSIFFLAGS, &r) < 0) fail("raise the loopback device");
    close(fd);
}

/* A disk that was packed without root's rights says that root owns everything. */
static void own_folder(const char *path) {
    struct stat s;
    if (conf.uid && path[1] && stat(path, &s) == 0 && s.st_uid == 0 && chown(path, conf.uid, conf.gid) < 0) fail(path);
}

/* The serial port of this name; its device node appears once its name is known. */
static int open_port(const char *name) {
    for (double end = now_s() + DEVICE_WAIT_S; now_s() < end; nap()) {
        DIR *ports = opendir("/sys/class/virtio-ports");
        for (struct dirent *e; ports && (e = readdir(ports));) {
            char path[400];
            snprintf(path, sizeof path, "/sys/class/virtio-ports/%s/name", e->d_name);
            char *found = slurp(path, NULL);
            int is_it = found && !strncmp(found, name, strlen(name));
            free(found);
            if (!is_it) continue;
            snprintf(path, sizeof path, "/dev/%s", e->d_name);
            int fd = open(path, O_RDWR | O_CLOEXEC);
            if (fd >= 0) { closedir(ports); return fd; }
        }
        if (ports) closedir(ports);
    }
    fail(name);
    return -1;
}

static int listen_vsock(unsigned port) {
    struct sockaddr_vm a = {.svm_family = AF_VSOCK, .svm_port = port, .svm_cid = VMADDR_CID_ANY};
    int fd = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC, 0);
    must(fd, "make a vsock");
    must(bind(fd, (struct sockaddr *)&a, sizeof a), "bind a vsock");
    must(listen(fd, 4), "listen on a vsock");
    return fd;
}

static void renew_text(int fd, const char *text) {
    if (ftruncate(fd, 0) == 0 && lseek(fd, 0, SEEK_SET) == 0) dprintf(fd, "%s\n", text);
}

/* `identity NANOSECONDS HOSTNAME SEED\n`, the seed in hexadecimal. */
static int renew(const char *line) {
    unsigned long long ns;
    char name[65], hex[2 * SEED_BYTES + 1];
    struct { struct rand_pool_info head; uint8_t seed[SEED_BYTES]; } pool = {.head = {.entropy_count = 8 * SEED_BYTES, .buf_size = SEED_BYTES}};
    if (sscanf(line, "identity %llu %64s %64[0-9a-f]", &ns, name, hex) != 3 || strlen(hex) != 2 * SEED_BYTES) return EINVAL;
    for (int i = 0; i < SEED_BYTES; i++) {
        unsigned byte;
        sscanf(hex + 2 * i, "%2x", &byte);
        pool.head.buf_size = SEED_BYTES;
        ((uint8_t *)pool.head.buf)[i] = (uint8_t)byte;
    }
    int fd = open("/dev/urandom", O_WRONLY | O_CLOEXEC);
    if (fd < 0) return errno;
    int bad = ioctl(fd, RNDADDENTROPY, &pool) < 0 || ioctl(fd, RNDRESEEDCRNG) < 0;
    close(fd);
    if (bad) return errno;
    struct timespec now = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    if (clock_settime(CLOCK_REALTIME, &now) < 0 || sethostname(name, strlen(name)) < 0) return errno;
    renew_text(hostname_fd, name);
    if (*conf.machine_id) { hex[32] = 0; renew_text(machine_id_fd, hex); }
    return 0;
}

static void answer_warden(int fd) {
    char line[256];
    size_t size = 0;
    for (;;) {
        ssize_t n = read(fd, line + size, sizeof line - 1 - size);
        if (n <= 0) {
            if (conf.vsock) return; /* the owner of a restored machine connects anew */
            nap();
            continue;
        }
        size += (size_t)n;
        line[size] = 0;
        if (!memchr(line, '\n', size) && size < sizeof line - 1) continue;
        dprintf(fd, "%d\n", renew(line));
        size = 0;
    }
}

static void *warden(void *port) {
    int fd = *(int *)port;
    if (!conf.vsock) answer_warden(fd);
    for (int owner; (owner = accept4(fd, NULL, NULL, SOCK_CLOEXEC)) >= 0 || errno == EINTR;) if (owner >= 0) { answer_warden(owner); close(owner); }
    return NULL;
}

/* This thread becomes the box's user; the warden does not, which is why the C library's own calls, meant for all threads, do not fit.
 * What stays with PID 1 and passes to no command: to signal every process, and to read the marks of the writable layer. */
static void drop_rights(void) {
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct caps[2] = {{0}};
    if (!conf.uid) return;
    must(prctl(PR_SET_KEEPCAPS, 1L, 0L, 0L, 0L), "keep two rights");
    must((int)syscall(SYS_setgroups, 0, NULL), "drop the groups");
    must((int)syscall(SYS_setresgid, conf.gid, conf.gid, conf.gid), "become the group");
    must((int)syscall(SYS_setresuid, conf.uid, conf.uid, conf.uid), "become the user");
    caps[0].permitted = caps[0].effective = 1u << CAP_KILL | 1u << CAP_SYS_ADMIN;
    must((int)syscall(SYS_capset, &head, caps), "drop the rights");
}

static void say_hello(void) {
    uint32_t hello[6] = {12, 0, SAY_HELLO, PROTOCOL, 0, FACT_PROC};
    if (write(agent_fd, hello, sizeof hello) != sizeof hello) fail("say hello");
}

int guest_main(void) {
    static int warden_fd;
    pthread_t thread;
    mkdir("/dev", 0755);
    mkdir("/proc", 0755);
    mkdir("/sys", 0755);
    must(mount("devtmpfs", "/dev", "devtmpfs", 0, "mode=755"), "mount /dev");
    must(mount("proc", "/proc", "proc", 0, NULL), "mount /proc");
    must(mount("sysfs", "/sys", "sysfs", 0, NULL), "mount /sys");
    umask(0);
    read_conf();
    load_modules();
    end_thrashing();
    int listening = -1;
    if (conf.vsock) {
        listening = listen_vsock(conf.vsock);
        warden_fd = listen_vsock(conf.vsock + 1);
    } else {
        agent_fd = open_port("rollmill.agent");
        warden_fd = open_port("rollmill.warden");
    }
    struct box box = {.workdir = conf.workdir, .env = conf.env, .upper_fd = build_root(), .layer_fd = -1,
                      .num_processes = (int)conf.num_processes, .is_contained = 1};
    must(chdir("/root"), "enter the root");
    must(mount(".", "/", NULL, MS_MOVE, NULL), "move the root");
    must(chroot("."), "change the root");
    make_links();
    raise_loopback();
    if (sethostname(conf.hostname, strlen(conf.hostname)) < 0) {}
    own_folder(conf.home);
    own_folder(conf.workdir);
    must(chdir(conf.workdir), "enter the working directory");
    umask(022);
    /* No signal may find its way to the warden: the end of a command, taken there, would be lost to the agent. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&thread, NULL, warden, &warden_fd) != 0) fail("start the warden");
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    drop_rights();
    if (!conf.vsock) {
        say_hello();
        return serve(agent_fd, agent_fd, &box);
    }
    /* A restored machine has lost its connection and keeps its listener: its new owner calls again. */
    for (int code = 0; code == 0;) {
        if ((agent_fd = accept4(listening, NULL, NULL, SOCK_CLOEXEC)) < 0) { if (errno == EINTR) continue; fail("accept the owner"); }
        say_hello();
        code = serve(agent_fd, agent_fd, &box);
        close(agent_fd);
    }
    return 0;
}
