// Life of a call: generations, tickets, waits, failure.
#include "engine.h"

#include <sched.h>
#include <time.h>

#include <stdexcept>

#include "megamoe/common/codes.h"

namespace megamoe::host {
namespace {

constexpr u32 kSpinsPerCheck = 1000;
constexpr u64 kYieldNs = 2'000'000;  // after this long a waiting worker sleeps between checks
constexpr u64 kLookNs = 100'000'000;  // how often it looks for dead peers and signals

u64 now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<u64>(time.tv_sec) * 1'000'000'000ull + static_cast<u64>(time.tv_nsec);
}

// The engine's arithmetic assumes IEEE subnormals; a caller may have switched them off for its thread.
class FloatMode {
public:
#if defined(__x86_64__)
    FloatMode() : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(0x1f80); }
    ~FloatMode() { __builtin_ia32_ldmxcsr(saved_); }
    FloatMode(const FloatMode&) = delete;
    FloatMode& operator=(const FloatMode&) = delete;

private:
    unsigned saved_;
#else
    FloatMode() {}
#endif
};

}  // namespace

Engine::Engine(u32 rank, std::vector<u64> bases, u64 workspace_bytes, const WorkspaceLimits& limits, u32 num_workers,
               const Isa* isa, const std::vector<i32>& pids)
    : rank_(rank), bases_(std::move(bases)), bytes_(workspace_bytes), limits_(limits), offsets_(0, limits), isa_(isa),
      peers_(pids), pool_(num_workers) {
    if (isa_ == nullptr) throw std::invalid_argument("isa: not available on this CPU");
    if (bases_.size() != limits.num_ranks || rank >= limits.num_ranks) throw std::invalid_argument("bases: one per rank");
    if (offsets_.end > bytes_) throw std::invalid_argument("workspace_bytes: smaller than the control region");
    for (u32 worker = 0; worker < num_workers; ++worker) workers_.push_back(std::make_unique<Worker>());
    auto generation = word_at<u32>(bases_[rank_] + offsets_.generation.address);
    if (generation.load(std::memory_order_relaxed) == 0) generation.store(kFirstGeneration, std::memory_order_relaxed);
}

u32 Engine::generation() const {
    return word_at<u32>(bases_[rank_] + offsets_.generation.address).load(std::memory_order_relaxed);
}

Outcome Engine::check() const {
    Outcome outcome;
    outcome.rank = rank_;
    for (u32 source = 0; source < limits_.num_ranks; ++source) {
        const u64 address = bases_[rank_] + offsets_.aborts.address + source * sizeof(u64);
        const u64 word = word_at<u64>(address).load(std::memory_order_acquire);  // pairs with fail()
        if (word == 0) continue;
        outcome.status = Status::aborted;
        const u32 phase = abort_phase(word_value(word));
        if (phase == kAbortShape) outcome.status = Status::shape_mismatch;
        if (phase == kAbortInterrupt) outcome.status = Status::interrupted;
        outcome.phase = phase < kAbortShape ? static_cast<Phase>(phase) : Phase::publish;
        outcome.whom = abort_whom(word_value(word));
        outcome.generation = word_generation(word);
        if (source == rank_) break;  // its own reason comes first
    }
    if (outcome.status == Status::aborted && peers_.gone(outcome.whom)) outcome.status = Status::gone;
    return outcome;
}

void Engine::reset(u32 generation) {
    const u64 base = bases_[rank_];
    for (const Region& region : {offsets_.ticket, offsets_.published, offsets_.exited, offsets_.aborts, offsets_.headers,
                                 offsets_.tags, offsets_.arrived, offsets_.l1_done, offsets_.l2_done,
                                 offsets_.unit_l1_done, offsets_.unit_l2_done}) {
        __builtin_memset(pointer_at<u8>(base + region.address), 0, region.bytes);
    }
    word_at<u32>(base + offsets_.generation.address).store(generation, std::memory_order_relaxed);
}

Outcome Engine::run(const Layer& layer, const ExpertPointers& experts, const CallArguments& call) {
    const DataLayout size(offsets_.end, limits_, layer.shape, layer.tile);
    if (size.end > bytes_) throw std::invalid_argument("workspace: too small for this layer");
    const u32 min_ring2 = min_ring2_units(layer.tile.lag, layer.tile.group, num_workers(), layer.l1_tiles());
    if (layer.tile.ring1_units < min_ring1_units(layer.tile.group) || layer.tile.ring2_units < min_ring2) {
        throw std::invalid_argument("rings: below the legal minimum for this lag, group and number of workers");
    }
    outcome_ = Outcome{};
    outcome_.rank = rank_;
    const Outcome before = check();
    if (before.status != Status::ok) {
        fill_nan(call, layer);
        return before;
    }
    failed_.store(0, std::memory_order_relaxed);
    trace_.clear();

    const bool too_many = call.num_tokens > limits_.max_tokens && call.overflow_error;
    const u32 own_chunks = too_many ? 1 : max_of(1u, ceil_div(call.num_tokens, limits_.max_tokens));
    u32 num_chunks = own_chunks;
    for (u32 chunk = 0; chunk < num_chunks; ++chunk) {
        const u64 first = static_cast<u64>(chunk) * limits_.max_tokens;
        CallArguments part = call;
        part.num_tokens = too_many || first >= call.num_tokens
                              ? 0
                              : min_of(limits_.max_tokens, call.num_tokens - static_cast<u32>(first));
        const u64 element = layer.config.input == Scalar::bf16 ? 2 : 4;
        if (part.num_tokens != 0) {
            part.x = static_cast<const u8*>(call.x) + first * layer.shape.hidden * element;
            part.out = static_cast<u8*>(call.out) + first * layer.shape.hidden * element;
            part.ids = static_cast<const u8*>(call.ids) + first * layer.shape.top_k * call.id_bytes;
            part.weights = call.weights + first * layer.shape.top_k;
        }
        const u32 number = generation();
        const u64 timeout_ns = static_cast<u64>(call.timeout_s * 1e9);
        Generation current{&layer, &experts, part, call.num_tokens, own_chunks, number, number % kBanks,
                           schedule_shape(layer.shape, layer.num_local_experts, part.num_tokens, layer.tile),
                           DataLayout(offsets_.end, limits_, layer.shape, layer.tile), timeout_ns,
                           std::this_thread::get_id()};
        current_ = &current;
        pool_.run([this](u32 worker) { work(worker); }, [this] { interrupted(Phase::end); });
        current_ = nullptr;
        for (auto& worker : workers_) {
            trace_.insert(trace_.end(), worker->trace.begin(), worker->trace.end());
            worker->trace.clear();
        }
        if (failed_.load(std::memory_order_acquire) != 0) {
            fill_nan(call, layer);
            return outcome_;
        }
        // The headers of this bank stay until this rank publishes the generation after the next.
        for (u32 source = 0; source < limits_.num_ranks; ++source) {
            const u64 address = bases_[rank_] + offsets_.header(number % kBanks, source, limits_.num_ranks);
            const CountHeader& header = *pointer_at<CountHeader>(address);
            num_chunks = max_of(num_chunks, header.num_chunks);
            Status status = Status::ok;
            if (call.overflow_error && header.total_tokens > limits_.max_tokens) status = Status::overflow;
            else if (call.check && header.num_bad_ids != 0) status = Status::bad_ids;
            if (status == Status::ok || outcome_.status != Status::ok) continue;
            outcome_.status = status;
            outcome_.whom = source;
            outcome_.seen = status == Status::overflow ? header.total_tokens : header.num_bad_ids;
            outcome_.expected = status == Status::overflow ? limits_.max_tokens : layer.shape.num_experts;
        }
    }
    if (outcome_.status != Status::ok) fill_nan(call, layer);
    return outcome_;
}

void Engine::work(u32 index) {
    FloatMode mode;
    Worker& worker = *workers_[index];
    worker.has_schedule = false;
    const u64 base = bases_[rank_];
    auto ticket_word = word_at<u32>(base + offsets_.ticket.address);
    for (;;) {
        // Relaxed: a ticket orders nothing, the counters do.
        const u32 ticket = ticket_word.fetch_add(1, std::memory_order_relaxed);
        Task task;
        if (ticket < current_->shape.publish_tasks) {
            task = Schedule::publish_task(ticket);
        } else {
            if (!worker.has_schedule && !build_schedule(worker)) break;
            task = worker.schedule.task(ticket);
            if (task.phase == Phase::end) break;
        }
        const u64 start = current_->call.trace ? now_ns() : 0;
        if (!wait_all(task)) break;
        switch (task.phase) {
            case Phase::publish: publish(task); break;
            case Phase::pull: pull(task); break;
            case Phase::l1: l1(worker, task); break;
            case Phase::l2: l2(worker, task); break;
            default:
                if (!combine(worker, task)) return;
        }
        signal_all(task);
        if (current_->call.trace) {
            worker.trace.push_back(TraceEvent{index, current_->number, ticket, static_cast<u32>(task.phase), task.expert,
                                              task.row_block, task.index, start, now_ns()});
        }
    }
    if (failed_.load(std::memory_order_acquire) != 0) return;  // reset() clears up
    auto exited = word_at<u32>(base + offsets_.exited.address);
    if (exited.fetch_add(1, std::memory_order_acq_rel) + 1 != num_workers()) return;
    // The last worker to leave: nobody reads these before the next generation starts.
    const u64 used = worker.schedule.num_row_blocks() * sizeof(u32);
    for (const Region& region : {offsets_.arrived, offsets_.l1_done, offsets_.l2_done, offsets_.unit_l1_done,
                                 offsets_.unit_l2_done}) {
        __builtin_memset(pointer_at<u8>(base + region.address), 0, used);
    }
    for (const Region& region : {offsets_.ticket, offsets_.published, offsets_.exited}) {
        word_at<u32>(base + region.address).store(0, std::memory_order_relaxed);
    }
    word_at<u32>(base + offsets_.generation.address).store(current_->number + 1, std::memory_order_relaxed);
}

u64 Engine::counter_address(Counter counter, u32 index) const {
    const u64 base = bases_[rank_] + index * sizeof(u32);
    switch (counter) {
        case Counter::arrived: return base + offsets_.arrived.address;
        case Counter::l1_done: return base + offsets_.l1_done.address;
        case Counter::l2_done: return base + offsets_.l2_done.address;
        case Counter::unit_l1_done: return base + offsets_.unit_l1_done.address;
        default: return base + offsets_.unit_l2_done.address;
    }
}

bool Engine::wait_all(const Task& task) {
    for (u32 i = 0; i < task.num_waits; ++i) {
        const Wait& need = task.waits[i];
        if (need.counter == Counter::peers || need.counter == Counter::tags) continue;  // build_schedule(), combine()
        if (!wait_counter(counter_address(need.counter, need.index), need.target, task.phase)) return false;
    }
    return true;
}

void Engine::signal_all(const Task& task) {
    for (u32 i = 0; i < task.num_signals; ++i) {
        const Wait& add = task.signals[i];
        auto counter = word_at<u32>(counter_address(add.counter, add.index));
        switch (add.counter) {
            case Counter::arrived: counter.fetch_add(add.target, release_of(Edge::pool)); break;
            case Counter::l1_done: counter.fetch_add(add.target, release_of(Edge::hidden)); break;
            case Counter::unit_l1_done: counter.fetch_add(add.target, release_of(Edge::ring1)); break;
            case Counter::unit_l2_done: counter.fetch_add(add.target, release_of(Edge::ring2)); break;
            default: {  // l2_done: the last finisher takes over the slots of all and tags them
                const u32 done = counter.fetch_add(add.target, acquire_release_of(Edge::scatter)) + add.target;
                if (done == current_->shape.l2_tiles) tag_block(task);
            }
        }
    }
}

template <typename Reached>
bool Engine::wait(Reached reached, u64 expected, Phase phase, u32 whom) {
    u64 seen = 0;
    if (reached(seen)) return true;
    const u64 begin = now_ns(), deadline = begin + current_->timeout_ns;
    u64 next_look = begin + kLookNs;
    for (;;) {
        for (u32 spin = 0; spin < kSpinsPerCheck; ++spin) {
            if (reached(seen)) return true;
            cpu_relax();
        }
        if (aborted(phase)) return false;
        const u64 now = now_ns();
        if (now > deadline) {
            fail(Status::timeout, phase, whom, seen, expected);
            return false;
        }
        if (now > next_look) {
            if (interrupted(phase)) return false;
            if (peers_.gone(whom)) {
                if (reached(seen)) return true;  // it was its last word
                fail(Status::gone, phase, whom, seen, expected);
                return false;
            }
            next_look = now + kLookNs;
        }
        if (now - begin < kYieldNs) {
            sched_yield();
        } else {
            const timespec pause{0, 50'000};
            nanosleep(&pause, nullptr);
        }
    }
}

bool Engine::wait_word(u64 address, u64 expected, Phase phase, u32 whom) {
    const auto word = word_at<u64>(address);
    return wait(
        [&](u64& seen) {
            seen = word.load(std::memory_order_acquire);  // pairs with Edge::publish and Edge::tag
            return seen == expected;
        },
        expected, phase, whom);
}

bool Engine::wait_counter(u64 address, u32 target, Phase phase) {
    const auto word = word_at<u32>(address);
    return wait(
        [&](u64& seen) {
            seen = word.load(std::memory_order_acquire);  // pairs with the signals of signal_all()
            return seen >= target;
        },
        target, phase, rank_);
}

bool Engine::aborted(Phase phase) {
    if (failed_.load(std::memory_order_acquire) != 0) return true;
    const Outcome peer = check();
    if (peer.status == Status::ok) return false;
    fail(peer.status, phase, peer.whom, peer.generation, current_->number);
    return true;
}

bool Engine::interrupted(Phase phase) {
    const CallArguments& call = current_->call;
    if (call.interrupted == nullptr || std::this_thread::get_id() != current_->caller) return false;
    if (failed_.load(std::memory_order_acquire) != 0 || !call.interrupted()) return false;
    fail(Status::interrupted, phase, rank_, 0, 0);
    return true;
}

bool Engine::fail(Status status, Phase phase, u32 whom, u64 seen, u64 expected) {
    u32 free = 0;
    if (!failed_.compare_exchange_strong(free, 1, std::memory_order_acq_rel, std::memory_order_acquire)) return false;
    outcome_ = Outcome{status, phase, rank_, whom, seen, expected, current_->number, {0, 0, 0, 0, 0}};
    u32 reason = static_cast<u32>(phase);
    if (status == Status::shape_mismatch) reason = kAbortShape;
    if (status == Status::interrupted) reason = kAbortInterrupt;
    const u64 word = control_word(current_->number, abort_value(reason, whom));
    for (const u64 base : bases_) {
        // Pairs with the acquire in check(). Stays until reset().
        word_at<u64>(base + offsets_.aborts.address + rank_ * sizeof(u64)).store(word, std::memory_order_release);
    }
    return true;
}

void Engine::fill_nan(const CallArguments& call, const Layer& layer) const {
    const u64 count = static_cast<u64>(call.num_tokens) * layer.shape.hidden;
    if (layer.config.input == Scalar::bf16) {
        u16* out = static_cast<u16*>(call.out);
        for (u64 i = 0; i < count; ++i) out[i] = 0x7fc0;
    } else {
        float* out = static_cast<float*>(call.out);
        for (u64 i = 0; i < count; ++i) out[i] = bits_float(kFloatNan);
    }
}

}  // namespace megamoe::host
