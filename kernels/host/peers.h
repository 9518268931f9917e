// Whether the processes of the other ranks still live.
#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

#include "megamoe/common/types.h"

namespace megamoe::host {

// One process per rank; 0 = not watched (this process, or one that this host cannot see).
class Peers {
public:
    explicit Peers(const std::vector<i32>& pids) {
        for (const i32 pid : pids) peers_.push_back(Peer{pid, pid == 0 ? -1 : open_process(pid)});
    }
    Peers(const Peers&) = delete;
    Peers& operator=(const Peers&) = delete;
    ~Peers() {
        for (const Peer& peer : peers_) {
            if (peer.handle >= 0) ::close(peer.handle);
        }
    }

    // True when the process has ended, reaped or not. A system call: not for a loop that spins.
    bool gone(u32 rank) const {
        if (rank >= peers_.size() || peers_[rank].pid == 0) return false;
        const Peer& peer = peers_[rank];
        if (peer.handle < 0) return ::kill(peer.pid, 0) != 0 && errno == ESRCH;
        pollfd poll{peer.handle, POLLIN, 0};
        return ::poll(&poll, 1, 0) == 1;
    }

private:
    struct Peer {
        i32 pid;
        int handle;  // -1 where the kernel gives none: then a dead process counts from when its parent has reaped it
    };

    static int open_process(i32 pid) {
#if defined(SYS_pidfd_open)
        return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
#else
        return -1;
#endif
    }

    std::vector<Peer> peers_;
};

}  // namespace megamoe::host
