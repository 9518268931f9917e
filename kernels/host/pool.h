// Worker threads that run one job at a time. The caller is worker 0. Start and finish are the only places with a lock, and
// both are looked for without it for a moment first: the next layer often follows within microseconds.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "megamoe/common/types.h"
#include "sync.h"

namespace megamoe::host {

class Pool {
public:
    explicit Pool(u32 num_workers) {
        for (u32 worker = 1; worker < num_workers; ++worker) {
            threads_.emplace_back([this, worker] { loop(worker); });
        }
    }
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;
    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        start_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

    u32 num_workers() const { return static_cast<u32>(threads_.size()) + 1; }

    // Runs job(worker) on every worker and returns when all are done. The caller asks idle() now and then meanwhile.
    void run(const std::function<void(u32)>& job, const std::function<void()>& idle) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = &job;
            busy_.store(threads_.size(), std::memory_order_relaxed);
            round_.fetch_add(1, std::memory_order_release);  // pairs with the acquire in loop()
        }
        start_.notify_all();
        job(0);
        for (u32 spin = 0; spin < kSpins && busy_.load(std::memory_order_acquire) != 0; ++spin) cpu_relax();
        std::unique_lock<std::mutex> lock(mutex_);
        const auto done = [this] { return busy_.load(std::memory_order_acquire) == 0; };
        while (!done_.wait_until(lock, std::chrono::system_clock::now() + kIdle, done)) {
            lock.unlock();  // idle() may wait for a lock of its own
            idle();
            lock.lock();
        }
    }

private:
    static constexpr u32 kSpins = 2000;  // some tens of microseconds
    static constexpr std::chrono::milliseconds kIdle{100};

    void loop(u32 worker) {
        u64 seen = 0;
        for (;;) {
            for (u32 spin = 0; spin < kSpins && round_.load(std::memory_order_acquire) == seen; ++spin) cpu_relax();
            if (round_.load(std::memory_order_acquire) == seen) {
                std::unique_lock<std::mutex> lock(mutex_);
                start_.wait(lock, [&] { return stop_ || round_.load(std::memory_order_acquire) != seen; });
                if (stop_) return;
            }
            ++seen;  // run() does not return, and no next round begins, before this worker is done
            (*job_)(worker);
            // Pairs with the acquire in run(). The lock keeps run() from missing the notice.
            if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
                std::lock_guard<std::mutex> lock(mutex_);
                done_.notify_one();
            }
        }
    }

    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable start_, done_;
    const std::function<void(u32)>* job_ = nullptr;
    std::atomic<u64> round_{0};
    std::atomic<std::size_t> busy_{0};
    bool stop_ = false;
};

}  // namespace megamoe::host
