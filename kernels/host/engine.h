// The engine: one object per rank. Workers claim in-order tickets and run the schedule over the symmetric workspace.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "layer.h"
#include "peers.h"
#include "pool.h"
#include "sync.h"

namespace megamoe::host {

enum class Status : u32 {
    ok = 0,
    timeout = 1,
    aborted = 2,
    shape_mismatch = 3,
    overflow = 4,
    bad_ids = 5,
    gone = 6,         // the process of `whom` has ended
    interrupted = 7,  // a signal came on `whom`
};

// What went wrong, on whom the rank waited and what it saw. Phase is the one of the wait.
struct Outcome {
    Status status = Status::ok;
    Phase phase = Phase::publish;
    u32 rank = 0;
    u32 whom = 0;
    u64 seen = 0;
    u64 expected = 0;
    u32 generation = 0;
    u32 seen_shape[5] = {0, 0, 0, 0, 0};
};

struct TraceEvent {
    u32 worker;
    u32 generation;
    u32 ticket;
    u32 phase;
    u32 expert;
    u32 row_block;
    u32 index;
    u64 start_ns;
    u64 end_ns;
};

class Engine {
public:
    // `bases`: the workspace of every rank as mapped here. `pids`: processes to watch, see Peers; may be empty.
    Engine(u32 rank, std::vector<u64> bases, u64 workspace_bytes, const WorkspaceLimits& limits, u32 num_workers,
           const Isa* isa, const std::vector<i32>& pids = {});

    // One call of the layer on this rank: as many generations as the rank with most tokens needs.
    Outcome run(const Layer& layer, const ExpertPointers& experts, const CallArguments& call);

    // Clears the control region for a common new generation. Every rank's workers must be at rest.
    void reset(u32 generation);
    u32 generation() const;
    // The failure that other calls would meet, without running one.
    Outcome check() const;

    u32 num_workers() const { return pool_.num_workers(); }
    const std::vector<TraceEvent>& trace() const { return trace_; }

private:
    // What one worker keeps of a generation. Aligned so that workers do not share lines.
    struct alignas(128) Worker {
        std::vector<u32> rows, first_unit, first_block;  // of the schedule
        std::vector<float> gate, up, sum, bias;
        std::vector<TraceEvent> trace;
        Schedule schedule;
        bool has_schedule = false;
    };

    // One generation's view of the call.
    struct Generation {
        const Layer* layer;
        const ExpertPointers* experts;
        CallArguments call;     // the tokens of this chunk only
        u32 total_tokens;
        u32 num_chunks;
        u32 number;
        u32 bank;
        ScheduleShape shape;
        DataLayout data;
        u64 timeout_ns;
        std::thread::id caller;
    };

    bool wait_word(u64 address, u64 expected, Phase phase, u32 whom);
    bool wait_counter(u64 address, u32 target, Phase phase);
    template <typename Reached>
    bool wait(Reached reached, u64 expected, Phase phase, u32 whom);
    bool aborted(Phase phase);
    // True where the caller's thread has been told to give up; others are not asked.
    bool interrupted(Phase phase);
    // True where this worker's failure is the one on record.
    bool fail(Status status, Phase phase, u32 whom, u64 seen, u64 expected);

    void work(u32 worker);
    bool build_schedule(Worker& worker);
    bool wait_all(const Task& task);
    void signal_all(const Task& task);
    u64 counter_address(Counter counter, u32 index) const;

    void publish(const Task& task);
    void publish_lists();
    i32 id_at(u64 index) const;
    void pull(const Task& task);
    void l1(Worker& worker, const Task& task);
    void l2(Worker& worker, const Task& task);
    void tag_block(const Task& task);
    bool combine(Worker& worker, const Task& task);
    void fill_nan(const CallArguments& call, const Layer& layer) const;

    u64 ring1_row(const Task& task) const;
    u64 ring2_row(const Task& task) const;
    RowMeta* meta_rows(const Task& task) const;

    u32 rank_;
    std::vector<u64> bases_;
    u64 bytes_;
    WorkspaceLimits limits_;
    ControlLayout offsets_;  // built at address zero: the same in every rank's workspace
    const Isa* isa_;
    Peers peers_;
    std::vector<std::unique_ptr<Worker>> workers_;
    std::vector<u32> list_offsets_;
    std::vector<TraceEvent> trace_;
    Generation* current_ = nullptr;
    std::atomic<u32> failed_{0};
    Outcome outcome_;
    Pool pool_;  // last: its threads end before anything else does
};

}  // namespace megamoe::host
