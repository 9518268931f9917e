// Worker threads that run one job at a time. The caller is worker 0. The lock guards start and finish only.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "megamoe/common/types.h"

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

    // Runs job(worker) on every worker and returns when all are done.
    void run(const std::function<void(u32)>& job) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = &job;
            ++round_;
            busy_ = threads_.size();
        }
        start_.notify_all();
        job(0);
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [this] { return busy_ == 0; });
        job_ = nullptr;
    }

private:
    void loop(u32 worker) {
        u64 seen = 0;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            start_.wait(lock, [&] { return stop_ || round_ != seen; });
            if (stop_) return;
            seen = round_;
            const std::function<void(u32)>* job = job_;
            lock.unlock();
            (*job)(worker);
            lock.lock();
            if (--busy_ == 0) done_.notify_one();
        }
    }

    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable start_, done_;
    const std::function<void(u32)>* job_ = nullptr;
    u64 round_ = 0;
    std::size_t busy_ = 0;
    bool stop_ = false;
};

}  // namespace megamoe::host
