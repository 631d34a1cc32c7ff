/* A box, from its fork to its end: prepared ahead of any order, furnished when one comes, locked in, then served as its first process.
 *
 * Order matters: mounts first, user namespace last, so that even all capabilities inside the box hold no power over its mounts and
 * its network. After `lock_in` nothing of the host can be reached or gained.
 */
#include "cage.h"
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define NUM_RESERVED 4 /* processes beyond the box's bound that the agent may start, so that a full table still lets one `kill` run */
#define DEFAULT_DISK (64ull << 20)
#define ROOT_CAPS ((1ull << CAP_CHOWN) | (1ull << CAP_DAC_OVERRIDE) | (1ull << CAP_FOWNER) | (1ull << CAP_FSETID) | (1ull << CAP_KILL) | \
                   (1ull << CAP_SETGID) | (1ull << CAP_SETUID) | (1ull << CAP_SETFCAP) | (1ull << CAP_DAC_READ_SEARCH))

struct order {
    uint32_t flags, num_processes, cpu_milli, uid, gid;
    uint64_t memory, disk;
    double lifetime_s;
    size_t num_layers, num_views, num_ports;
    uint16_t ports[MAX_PORTS];
    char *hostname, *workdir, *home, *trust;
    char **env;
    int socket, layers[MAX_FDS], views[MAX_FDS];
};

/* What was made before the order. */
struct embryo { int userns, proc, pts, disk, layer; char group[32]; };

static const struct settings *s_;
static int socket_ = -1; /* once there is an owner to tell */
static uint32_t slot_, serial_;
#define MAX_PROCESSES 32768 /* of a box whose order is not known yet */
#define MAX_TERMINALS "64"

/* A user of this box alone, beyond those that boxes have: what the kernel counts per user is then counted per box. */
static uid_t own_user(void) { return s_->num_ids > 1 ? s_->id_base + s_->num_ids + serial_ % 65536 : 0; }

static void tell_zygote(uint32_t what, int number, const char *step) {
    uint8_t message[12 + 128];
    uint32_t head[3] = {slot_, what, (uint32_t)number};
    size_t n = step ? strnlen(step, 128) : 0;
    memcpy(message, head, 12);
    if (n) memcpy(message + 12, step, n);
    send_with(s_->news_fd, message, 12 + n, NULL, 0);
}

static void __attribute__((noreturn)) fail(const char *step) {
    int number = errno;
    if (socket_ < 0) tell_zygote(NEWS_FAILED, number, step);
    else {
        struct buffer body = {0}, frame = {0};
        char words[256];
        int n = snprintf(words, sizeof words, "%s: %s", step, strerror(number));
        put_u32(&body, (uint32_t)number);
        put_text(&body, words, (size_t)n);
        put_u32(&frame, (uint32_t)body.size); put_u32(&frame, 0); put_u32(&frame, SAY_LAST_WORDS);
        put(&frame, body.data, body.size);
        send_with(socket_, frame.data, frame.size, NULL, 0);
    }
    _exit(1);
}

static void loopback_up(void) {
    struct ifreq r = {.ifr_name = "lo"};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || ioctl(fd, SIOCGIFFLAGS, &r) < 0) fail("read the flags of the loopback");
    r.ifr_flags |= IFF_UP;
    if (ioctl(fd, SIOCSIFFLAGS, &r) < 0) fail("bring the loopback up");
    close(fd);
}

static void enter_group(struct embryo *e, uint32_t group) {
    char path[64];
    if (s_->memory_fd < 0) return;
    snprintf(e->group, sizeof e->group, "b%u", group);
    if (s_->groups == 2) return; /* born in it */
    if (mkdirat(s_->memory_fd, e->group, 0755) < 0 && errno != EEXIST) fail("make a control group");
    snprintf(path, sizeof path, "%s/cgroup.procs", e->group);
    if (write_at(s_->memory_fd, path, "0") < 0) fail("enter a control group");
}

static void limit_disk(int fs, uint64_t size) {
    char text[32];
    uint64_t inodes = size / 4096 < 1024 ? 1024 : size / 4096;
    snprintf(text, sizeof text, "%llu", (unsigned long long)size);
    if (fs_string(fs, "size", text) < 0) fail("bound the disk");
    snprintf(text, sizeof text, "%llu", (unsigned long long)inodes);
    if (fs_string(fs, "nr_inodes", text) < 0) fail("bound the number of files");
}

static void make_disk(struct embryo *e) {
    static const struct { const char *name; mode_t mode; } folders[] = {{"upper", 0755}, {"work", 0700}, {"shm", 01777}, {"bare", 0755}};
    int fs = sys_fsopen("tmpfs");
    if (fs < 0) fail("open a tmpfs");
    limit_disk(fs, DEFAULT_DISK);
    if (fs_string(fs, "mode", "0755") < 0 || fs_do(fs, FS_CREATE) < 0) fail("make a tmpfs");
    if ((e->disk = sys_fsmount(fs, ATTR_NOSUID | ATTR_NODEV)) < 0) fail("mount a tmpfs");
    close(fs);
    for (size_t i = 0; i < 4; i++) {
        if (mkdirat(e->disk, folders[i].name, 0755) < 0 || fchmodat(e->disk, folders[i].name, folders[i].mode, 0) < 0) fail("make folders on the disk");
        if (!s_->is_rootless && fchownat(e->disk, folders[i].name, s_->id_base, s_->id_base, 0) < 0) fail("give the disk to the box");
    }
}

static void prepare(struct embryo *e, uint32_t group) {
    *e = (struct embryo){.proc = -1, .pts = -1, .layer = -1};
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setsid();
    enter_group(e, group);
    if (unshare(CLONE_NEWNET) < 0) fail("unshare the network namespace");
    loopback_up();
    int fs = sys_fsopen("proc");
    if (fs >= 0 && fs_do(fs, FS_CREATE) == 0) e->proc = sys_fsmount(fs, ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC);
    if (fs >= 0) close(fs); /* some kernels refuse a /proc to a user namespace: the box then has none, and says so */
    fs = sys_fsopen("devpts");
    if (fs >= 0) {
        char gid[16];
        snprintf(gid, sizeof gid, "%u", s_->id_base + 5);
        if (s_->num_ids > 1) fs_string(fs, "gid", gid);
        fs_string(fs, "mode", "0620");
        fs_string(fs, "ptmxmode", "0666");
        fs_string(fs, "max", MAX_TERMINALS); /* else a box could take all of the machine's */
        if (fs_do(fs, FS_CREATE) == 0) e->pts = sys_fsmount(fs, ATTR_NOSUID | ATTR_NOEXEC);
        close(fs);
    }
    if ((e->userns = make_userns(s_, own_user(), MAX_PROCESSES)) < 0) fail("make a user namespace");
    make_disk(e);
    if (s_->by_path && sys_move_mount(e->disk, "", AT_FDCWD, "/run") < 0) fail("attach the disk");
}

/* The next order; the process ends quietly when the owner has gone. */
static void await_order(struct order *o) {
    static uint8_t data[1 << 16];
    size_t size, num_fds, at = 1;
    int fds[MAX_FDS];
    if (receive(s_->orders_fd, data, sizeof data, &size, fds, &num_fds) <= 0) _exit(0);
    tell_zygote(NEWS_TAKEN, 0, NULL);
    if (!num_fds) _exit(1);
    socket_ = o->socket = fds[0];
    struct cursor c = {data, data + size, 0};
    o->flags = get_u32(&c); o->num_processes = get_u32(&c); o->cpu_milli = get_u32(&c); o->uid = get_u32(&c); o->gid = get_u32(&c);
    o->memory = get_u64(&c); o->disk = get_u64(&c);
    o->lifetime_s = get_f64(&c);
    o->num_layers = get_u16(&c); o->num_views = get_u16(&c); o->num_ports = get_u16(&c);
    size_t num_env = get_u16(&c);
    errno = EINVAL;
    if (c.bad || o->num_ports > MAX_PORTS || 1 + o->num_layers + o->num_views != num_fds) fail("read the order");
    for (size_t i = 0; i < o->num_ports; i++) o->ports[i] = get_u16(&c);
    o->hostname = get_string(&c); o->workdir = get_string(&c); o->home = get_string(&c); o->trust = get_string(&c);
    if (!(o->env = calloc(num_env + 1, sizeof *o->env))) _exit(70);
    for (size_t i = 0; i < num_env; i++) if (!(o->env[i] = get_string(&c))) fail("read the environment of the order");
    if (c.bad || !o->hostname || !o->workdir || !o->home || !o->trust) fail("read the order");
    for (size_t i = 0; i < o->num_layers; i++) o->layers[i] = fds[at++];
    for (size_t i = 0; i < o->num_views; i++) o->views[i] = fds[at++];
}

static void limit_group(const struct embryo *e, const struct order *o) {
    char path[64], text[64];
    if (s_->memory_fd >= 0) {
        /* Pages of the disk count as memory; without this allowance a full disk would look like a memory bomb. */
        snprintf(text, sizeof text, "%llu", (unsigned long long)(o->memory + o->disk));
        if (s_->groups == 1) { /* a bound from an earlier use would keep memory below it */
            snprintf(path, sizeof path, "%s/memory.memsw.limit_in_bytes", e->group);
            write_at(s_->memory_fd, path, "-1");
        }
        snprintf(path, sizeof path, "%s/%s", e->group, s_->groups == 2 ? "memory.max" : "memory.limit_in_bytes");
        if (write_at(s_->memory_fd, path, text) < 0) fail("bound the memory");
        if (s_->groups == 1) { /* version 1 counts the buffers of sockets only where they have a bound */
            snprintf(path, sizeof path, "%s/memory.kmem.tcp.limit_in_bytes", e->group);
            write_at(s_->memory_fd, path, text);
        }
        snprintf(path, sizeof path, "%s/%s", e->group, s_->groups == 2 ? "memory.swap.max" : "memory.memsw.limit_in_bytes");
        write_at(s_->memory_fd, path, s_->groups == 2 ? "0" : text); /* absent without swap accounting */
    }
    if (!o->cpu_milli) return;
    if (s_->groups == 2) {
        snprintf(path, sizeof path, "%s/cpu.max", e->group);
        snprintf(text, sizeof text, "%u 100000", o->cpu_milli * 100);
        if (s_->memory_fd < 0 || write_at(s_->memory_fd, path, text) < 0) fail("bound the CPU time (this machine gives no cpu controller)");
        return;
    }
    errno = ENOTSUP;
    if (s_->cpu_fd < 0 || (mkdirat(s_->cpu_fd, e->group, 0755) < 0 && errno != EEXIST)) fail("bound the CPU time (this machine gives no cpu controller)");
    snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", e->group);
    snprintf(text, sizeof text, "%u", o->cpu_milli * 100);
    if (write_at(s_->cpu_fd, path, text) < 0) fail("bound the CPU time");
    snprintf(path, sizeof path, "%s/cgroup.procs", e->group);
    if (write_at(s_->cpu_fd, path, "0") < 0) fail("bound the CPU time");
}

/* Old kernels stack attached mounts only, named by path: the layers, clones of our own, are moved beside the writable one. */
static void mount_root_by_path(const struct order *o) {
    char options[4096], at[64];
    size_t n = (size_t)snprintf(options, sizeof options, "%supperdir=/run/upper,workdir=/run/work,lowerdir=", s_->user_xattr ? "userxattr," : "");
    for (size_t i = 0; i < o->num_layers; i++) {
        snprintf(at, sizeof at, "/run/l%zu", i);
        if (mkdir(at, 0700) < 0 || sys_move_mount(o->layers[i], "", AT_FDCWD, at) < 0) fail("attach a layer");
        n += (size_t)snprintf(options + n, n < sizeof options ? sizeof options - n : 0, "%s%s", i ? ":" : "", at);
    }
    if (o->flags & ORDER_HOST) n += (size_t)snprintf(options + n, n < sizeof options ? sizeof options - n : 0, "%s/", o->num_layers ? ":" : "");
    errno = E2BIG;
    if (n >= sizeof options) fail("name the layers");
    if (mount("overlay", "/mnt", "overlay", MS_NOSUID | MS_NODEV, options) < 0) fail("make the overlay");
}

static void mount_root(struct embryo *e, const struct order *o) {
    if (o->disk != DEFAULT_DISK) {
        int fs = sys_fspick(e->disk);
        if (fs < 0) fail("size the disk");
        limit_disk(fs, o->disk);
        if (fs_do(fs, FS_RECONFIGURE) < 0) fail("size the disk");
        close(fs);
    }
    const char *given = o->flags & ORDER_BARE ? "bare" : "upper";
    if ((e->layer = sys_open_tree(e->disk, given, TREE_CLONE)) < 0) fail("hold the writable layer");
    if (s_->by_path) { mount_root_by_path(o); return; }
    int upper = openat(e->disk, "upper", O_PATH | O_DIRECTORY | O_CLOEXEC), work = openat(e->disk, "work", O_PATH | O_DIRECTORY | O_CLOEXEC);
    int fs = sys_fsopen("overlay");
    if (fs < 0) fail("open an overlay");
    for (size_t i = 0; i < o->num_layers; i++) if (fs_fd(fs, "lowerdir+", o->layers[i]) < 0) fail("stack a layer");
    if (o->flags & ORDER_HOST && fs_fd(fs, "lowerdir+", s_->template_fd) < 0) fail("stack the template");
    if (fs_fd(fs, "upperdir", upper) < 0 || fs_fd(fs, "workdir", work) < 0) fail("give the overlay its disk");
    if (s_->user_xattr && fs_flag(fs, "userxattr") < 0) fail("ask the overlay for user attributes");
    fs_flag(fs, "volatile");
    if (fs_do(fs, FS_CREATE) < 0) fail("make the overlay");
    int root = sys_fsmount(fs, ATTR_NOSUID | ATTR_NODEV);
    if (root < 0) fail("mount the overlay");
    close(fs); close(upper); close(work);
    if (sys_move_mount(root, "", AT_FDCWD, "/mnt") < 0) fail("attach the root");
    close(root);
}

static void show(int fd, const char *path, const char *at, uint64_t attributes) {
    /* A view that came by path is a clone of our own already. So is a folder of the host, which only its opener's namespace may clone. */
    int clone = s_->by_path && !*path ? dup(fd) : sys_open_tree(fd, path, TREE_CLONE | (*path ? 0 : TREE_EMPTY));
    if (clone < 0 && errno == EINVAL && !*path) clone = dup(fd);
    if (clone < 0 || (attributes && sys_set_attributes(clone, "", TREE_EMPTY, attributes, -1) < 0)) fail("show a layer");
    if (sys_move_mount(clone, "", AT_FDCWD, at) < 0) fail("show a layer");
    close(clone);
}

/* The working folder and the home of images that lack them. */
static void make_home(int root, const char *path, const struct order *o) {
    char at[4096];
    size_t n = strlen(path);
    if (n == 0 || n >= sizeof at || path[0] != '/') { errno = EINVAL; fail("find the working folder"); }
    for (size_t i = 1; i <= n; i++) {
        if (path[i] != '/' && path[i]) continue;
        snprintf(at, sizeof at, "%.*s", (int)i, path);
        char *name = strrchr(at, '/');
        *name++ = 0;
        int folder = open_below(root, *at ? at : "/", O_PATH | O_DIRECTORY, 0);
        if (folder < 0) return; /* programs of the box made something else of it, which is theirs to see */
        if (*name && mkdirat(folder, name, 0755) == 0 && !s_->is_rootless &&
            fchownat(folder, name, s_->id_base + o->uid, s_->id_base + o->gid, AT_SYMLINK_NOFOLLOW) < 0) fail("give the working folder to its user");
        close(folder);
    }
}

/* A folder that an image lacks, root's. */
static void make_folder(const char *at, mode_t mode) {
    if (mkdir(at, mode) < 0) return;
    if (chmod(at, mode) < 0 || (!s_->is_rootless && chown(at, s_->id_base, s_->id_base) < 0)) fail("make a folder that the image lacks");
}

/* Once: a box that goes on above its snapshot has it already. */
static void add_trust(int root, const char *certificates, int is_used) {
    struct stat st;
    int fd = open_below(root, "/etc/ssl/certs/ca-certificates.crt", O_RDWR | O_APPEND | O_NONBLOCK, 0);
    if (fd >= 0 && fstat(fd, &st) == 0 && !S_ISREG(st.st_mode)) { close(fd); return; }
    if (fd < 0 && is_used) return; /* made so by programs of the box, which then trust nobody */
    if (fd < 0) fail("open /etc/ssl/certs/ca-certificates.crt");
    char *held = malloc((size_t)st.st_size + 1);
    if (!held || pread(fd, held, (size_t)st.st_size, 0) != st.st_size) fail("read /etc/ssl/certs/ca-certificates.crt");
    held[st.st_size] = 0;
    if (!strstr(held, certificates) && write(fd, certificates, strlen(certificates)) < 0) fail("add to /etc/ssl/certs/ca-certificates.crt");
    free(held);
    close(fd);
}

static void furnish(struct embryo *e, const struct order *o) {
    mount_root(e, o);
    if (chdir("/mnt") < 0) fail("enter the root");
    char at[64];
    for (size_t i = 0; i < s_->num_grafts; i++) {
        const char *from = s_->grafts[i];
        if (!(o->flags & ORDER_HOST) && strcmp(from, "/dev")) continue;
        if (!(o->flags & ORDER_HOST)) make_folder("dev", 0755);
        char to[4096];
        snprintf(to, sizeof to, ".%s", from);
        if (sys_move_mount(AT_FDCWD, from, AT_FDCWD, to) < 0) fail("take along what the host shows");
    }
    if (!(o->flags & ORDER_HOST)) { make_folder("proc", 0555); make_folder("tmp", 01777); }
    if (!(o->flags & ORDER_LIVE) && e->proc >= 0 && sys_move_mount(e->proc, "", AT_FDCWD, "./proc") < 0) fail("mount /proc");
    if (e->pts >= 0 && sys_move_mount(e->pts, "", AT_FDCWD, "./dev/pts") < 0) fail("mount /dev/pts");
    int shm = sys_open_tree(e->disk, "shm", TREE_CLONE);
    if (shm < 0 || sys_move_mount(shm, "", AT_FDCWD, "./dev/shm") < 0) fail("mount /dev/shm");
    close(shm);
    if (o->flags & ORDER_BARE) {
        if (mkdir("mnt/layer", 0755) < 0 && errno != EEXIST) fail("show the bare layer");
        show(e->disk, "bare", "./mnt/layer", 0);
    }
    for (size_t i = 0; i < o->num_views; i++) {
        mkdir("mnt/view", 0755);
        snprintf(at, sizeof at, "./mnt/view/%zu", i);
        mkdir(at, 0755);
        show(o->views[i], "", at, ATTR_RDONLY | ATTR_NODEV | ATTR_NOSUID);
    }
    int root = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    make_home(root, o->home, o);
    make_home(root, o->workdir, o);
    if (o->flags & ORDER_EGRESS) {
        static const char resolver[] = "nameserver 10.0.2.3\n";
        int etc = open_below(root, "/etc", O_PATH | O_DIRECTORY, 0);
        if (etc >= 0) {
            unlinkat(etc, "resolv.conf", 0);
            int fd = openat(etc, "resolv.conf", O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
            if (fd >= 0 && (write(fd, resolver, sizeof resolver - 1) < 0 || (!s_->is_rootless && fchown(fd, s_->id_base, s_->id_base) < 0)))
                fail("write /etc/resolv.conf");
            if (fd >= 0) close(fd);
            close(etc);
        }
    }
    if (o->trust[0]) add_trust(root, o->trust, o->num_layers > (o->flags & ORDER_HOST ? 0 : 1));
    close(root);
    if (sys_pivot_root(".", ".") < 0 || umount2(".", MNT_DETACH) < 0 || chdir("/") < 0) fail("pivot into the root");
    if (o->hostname[0] && sethostname(o->hostname, strlen(o->hostname)) < 0) fail("set the host name");
}

/* Every IPv4 address becomes local, so that our listeners are whatever a program dials. */
static void every_address_is_here(void) {
    struct { struct nlmsghdr head; struct rtmsg route; struct rtattr attr; uint32_t device; } m = {
        .head = {sizeof m, RTM_NEWROUTE, NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE, 1, 0},
        .route = {.rtm_family = AF_INET, .rtm_table = RT_TABLE_LOCAL, .rtm_protocol = RTPROT_BOOT, .rtm_scope = RT_SCOPE_HOST, .rtm_type = RTN_LOCAL},
        .attr = {RTA_LENGTH(4), RTA_OIF}, .device = 1};
    struct { struct nlmsghdr head; struct nlmsgerr error; char more[256]; } answer;
    int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
    if (fd < 0 || send(fd, &m, sizeof m, 0) < 0 || recv(fd, &answer, sizeof answer, 0) < 0) fail("add a route");
    if (answer.error.error) { errno = -answer.error.error; fail("add a route"); }
    close(fd);
}

static size_t open_ports(const struct order *o, int *fds) {
    size_t n = 0;
    if (!(o->flags & ORDER_EGRESS)) return 0;
    every_address_is_here();
    for (size_t i = 0; i < o->num_ports + 2; i++) { /* the last two: names, by datagram and by stream */
        int is_datagram = i == o->num_ports, one = 1;
        struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(i < o->num_ports ? o->ports[i] : 53)};
        int fd = socket(AF_INET, (is_datagram ? SOCK_DGRAM : SOCK_STREAM) | SOCK_CLOEXEC, 0);
        if (fd < 0) fail("open a port");
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (is_datagram) setsockopt(fd, IPPROTO_IP, IP_PKTINFO, &one, sizeof one);
        if (bind(fd, (struct sockaddr *)&at, sizeof at) < 0 || (!is_datagram && listen(fd, 128) < 0)) fail("listen on a port");
        fds[n++] = fd;
    }
    return n;
}

static void limit(int which, rlim_t value) {
    struct rlimit r;
    if (getrlimit((__rlimit_resource_t)which, &r) < 0) fail("read a limit");
    if (r.rlim_max == RLIM_INFINITY || value < r.rlim_max) r.rlim_max = value;
    r.rlim_cur = r.rlim_max;
    if (setrlimit((__rlimit_resource_t)which, &r) < 0) fail("set a limit");
}

static void enter_userns(const struct embryo *e, const struct order *o) {
    uid_t own = own_user();
    int userns = e->userns;
    /* Root of a box can be any of its users, each with a bound of its own on processes: the namespace gets one for all. */
    if (o->flags & ORDER_ROOT && (userns = make_userns(s_, own, o->num_processes + NUM_RESERVED + 1)) < 0) fail("make a user namespace");
    /* CRIU reads the bounds of processes: a root that may not pass its own bounds can do so only in a namespace that it made. */
    if (o->flags & ORDER_LIVE && prctl(PR_CAPBSET_READ, CAP_SYS_RESOURCE) == 0 && (userns = make_userns(s_, 0, 0)) < 0) fail("make a user namespace");
    if (own && setresuid(own, (uid_t)-1, (uid_t)-1) < 0) fail("become a user of our own");
    if (setns(userns, CLONE_NEWUSER) < 0) fail("enter the user namespace");
}

static void lock_in(const struct embryo *e, const struct order *o) {
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{0}, {0}};
    uint64_t kept = o->flags & ORDER_ROOT ? ROOT_CAPS : 0;
    uid_t own = own_user();
    if (!(o->flags & ORDER_LIVE)) enter_userns(e, o);
    if (s_->num_ids > 1 && setgroups(0, NULL) < 0) fail("drop groups");
    if (setresgid(o->gid, o->gid, o->gid) < 0) fail("become the group of the box");
    prctl(PR_SET_KEEPCAPS, 1);
    if (setresuid(own ? (uid_t)-1 : o->uid, o->uid, o->uid) < 0) fail("become the user of the box");
    limit(RLIMIT_CORE, 0);
    limit(RLIMIT_FSIZE, o->disk);
    limit(RLIMIT_NOFILE, 1024);
    limit(RLIMIT_NPROC, o->num_processes + NUM_RESERVED);
    limit(RLIMIT_MEMLOCK, 8 << 20);
    limit(RLIMIT_SIGPENDING, 4096);
    limit(RLIMIT_MSGQUEUE, 512 << 10);
    if (s_->memory_fd < 0) limit(RLIMIT_AS, o->memory);
    for (int cap = 0; cap <= 40; cap++) if (!(kept >> cap & 1)) prctl(PR_CAPBSET_DROP, cap);
    for (int i = 0; i < 2; i++) data[i].effective = data[i].permitted = data[i].inheritable = (uint32_t)(kept >> (32 * i));
    if (syscall(SYS_capset, &head, data) < 0) fail("give up capabilities");
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0) fail("give up new privileges");
    /* A program of the box, same user as the agent, can neither trace it nor reach its descriptors. */
    if (prctl(PR_SET_DUMPABLE, 0) < 0) fail("become untraceable");
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (s_->num_filter) {
        struct sock_fprog program = {(unsigned short)(s_->num_filter / 8), (struct sock_filter *)s_->filter};
        if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0) fail("install the system-call filter");
    }
}

/* A /proc of the pid namespace that `box` is the first process of. */
static int mount_proc_of(int box) {
    int status = -1;
    if (setns(box, CLONE_NEWPID) < 0) return -1;
    pid_t pid = fork();
    if (pid == 0) {
        int fs = sys_fsopen("proc"), mount = fs >= 0 && fs_do(fs, FS_CREATE) == 0 ? sys_fsmount(fs, ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC) : -1;
        _exit(mount < 0 || sys_move_mount(mount, "", AT_FDCWD, "/proc") < 0 ? errno : 0);
    }
    if (pid < 0 || waitpid(pid, &status, 0) < 0) return -1;
    errno = WIFEXITED(status) ? WEXITSTATUS(status) : EIO;
    return status ? -1 : 0;
}

/* For a box that can be forked live: CRIU, in the box's user namespace, may choose process numbers and repair connections only in a pid and a
   network namespace that belong to it. Both are made anew below that user namespace, and only the first process in there returns;
   this one waits for its end, seen by nobody. */
static void descend(const struct embryo *e, const struct order *o) {
    int pair[2], status = 0;
    pid_t first = -1;
    char byte;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0) fail("make a socket pair");
    pid_t middle = fork();
    if (middle < 0) fail("fork");
    if (middle == 0) {
        enter_userns(e, o);
        if (unshare(CLONE_NEWPID | CLONE_NEWNET) < 0) fail("unshare pid and network namespaces");
        if ((first = fork()) < 0) fail("fork");
        if (first > 0) { send_with(pair[1], &first, sizeof first, NULL, 0); _exit(0); }
        close(pair[0]);
        if (read(pair[1], &byte, 1) != 1) _exit(1);
        close(pair[1]);
        loopback_up();
        return;
    }
    close(pair[1]);
    if (read(pair[0], &first, sizeof first) != sizeof first) _exit(1);
    waitpid(middle, NULL, 0); /* the first process is ours now */
    int box = (int)syscall(SYS_pidfd_open, first, 0);
    if (box < 0 || mount_proc_of(box) < 0) fail("mount /proc");
    if (send(pair[0], "", 1, MSG_NOSIGNAL) != 1) _exit(1);
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct none[2] = {{0}, {0}};
    keep_only(NULL, 0);
    syscall(SYS_capset, &head, none);
    for (pid_t pid; (pid = wait(&status)) != first;) if (pid < 0 && errno != EINTR) _exit(1);
    _exit(WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
}

static int by_number(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

void live(const struct settings *s, uint32_t slot, uint32_t serial, uint32_t group) {
    struct embryo e;
    struct order o = {0};
    int ports[MAX_PORTS + 2];
    s_ = s;
    slot_ = slot;
    serial_ = serial;
    int kept[] = {s->orders_fd, s->news_fd, s->proc_fd, s->template_fd, s->memory_fd, s->cpu_fd};
    qsort(kept, 6, sizeof *kept, by_number);
    keep_only(kept, 6);
    prepare(&e, group);
    tell_zygote(NEWS_PREPARED, 0, NULL);
    await_order(&o);
    limit_group(&e, &o);
    /* Only now: the root of a control-group namespace may be closed to bounds from inside. */
    if (unshare(CLONE_NEWCGROUP) < 0) fail("unshare the control-group namespace");
    furnish(&e, &o);
    if (o.flags & ORDER_LIVE) { o.num_processes++; descend(&e, &o); } /* one more: the nursery is no program of the box's */
    size_t num_ports = open_ports(&o, ports);
    lock_in(&e, &o);
    struct box box = {.workdir = o.workdir, .env = o.env, .upper_fd = e.layer, .layer_fd = e.layer,
                      .num_processes = (int)o.num_processes, .lifetime_s = o.lifetime_s, .is_contained = 1, .has_nursery = !!(o.flags & ORDER_LIVE)};
    uint32_t facts = (e.proc >= 0 ? FACT_PROC : 0) | (s->has_idmap ? FACT_IDMAP : 0) | (s->memory_fd >= 0 ? FACT_MEMORY_GROUP : 0) |
                     (s->num_filter ? FACT_SECCOMP : 0);
    uint32_t hello[6] = {12, 0, SAY_HELLO, PROTOCOL, slot, facts};
    if (send_with(o.socket, hello, sizeof hello, ports, num_ports) < 0) _exit(0);
    int last[] = {o.socket, e.layer};
    qsort(last, 2, sizeof *last, by_number);
    keep_only(last, 2);
    _exit(serve(o.socket, o.socket, &box));
}
