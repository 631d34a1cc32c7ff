/* Runs a program of the host inside a box: in its namespaces and control groups, but without its filter and bounds. For CRIU.
 *
 * `join PID USER LAST KIT [GROUP]... -- WORD...`: PID is the box's first process; USER 1: in its user namespace too, as its root; LAST: the
 * number after which the box counts on, so that the program gets none that it is to restore; KIT: the descriptor of a folder
 * with the program's own loader, `ld.so`, because neither it nor its libraries can be seen from inside; GROUP: files to enter groups by.
 */
#include "box.h"
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void need(int is_done, const char *step) {
    if (is_done) return;
    perror(step);
    _exit(125);
}

static int wait_for(pid_t pid) {
    int status = -1;
    while (waitpid(pid, &status, 0) < 0) {}
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int join_main(int argc, char **argv) {
    int at = 6;
    if (argc < 8) return 2;
    const char *last = argv[4];
    for (; at < argc && strcmp(argv[at], "--"); at++) {
        int fd = open(argv[at], O_WRONLY | O_CLOEXEC);
        if (fd < 0) continue; /* a group that this box does not have */
        need(write(fd, "0", 1) == 1, argv[at]);
        close(fd);
    }
    int box = (int)syscall(SYS_pidfd_open, atoi(argv[2]), 0);
    need(box >= 0, "find the box");
    need(setns(box, CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP) == 0, "enter the box");
    if (atoi(last)) {
        pid_t pid = fork();
        if (pid == 0) {
            int fd = open("/proc/sys/kernel/ns_last_pid", O_WRONLY | O_CLOEXEC);
            need(fd >= 0 && write(fd, last, strlen(last)) > 0, "choose a process number");
            _exit(0);
        }
        if (wait_for(pid)) return 125;
    }
    if (atoi(argv[3])) {
        need(setns(box, CLONE_NEWUSER) == 0, "enter the user namespace of the box");
        need(setresgid(0, 0, 0) == 0 && setresuid(0, 0, 0) == 0, "become root of the box");
    }
    close(box);
    pid_t pid = fork();
    if (pid == 0) {
        extern char **environ;
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* who gives us up gives it up */
        syscall(SYS_execveat, atoi(argv[5]), "ld.so", argv + at + 1, environ, 0);
        need(0, "run the program");
    }
    return wait_for(pid);
}
