// Timed reads and copies: what a disk, a page cache and a memory bus give, measured with the engine's own readers and
// warmers so that a ceiling is one the engine could reach.
//
// Each call opens the files anew (a descriptor remembers read-ahead), sets its memory up before the clock starts, and
// stops asking for more once `seconds` have passed; what was asked for by then is waited for and counted. All throw
// Error(io) for a file that cannot be opened, mapped or read, Error(usage) for members and arguments that are none,
// Error(unsupported) for what this kernel refuses.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace moestream {

struct ProbeRange {
    uint32_t file = 0;  // which of `files`
    uint64_t offset = 0;
    uint32_t bytes = 0;
};

struct ProbeTiming {
    uint64_t bytes = 0;
    uint64_t reads = 0;  // ranges, whole
    double seconds = 0;
    double cpu_seconds = 0;  // of the whole process
};

struct ProbeReads {
    std::vector<std::string> files;
    std::string reader;          // "uring:8", "threads:4"
    uint32_t in_flight = 1;      // ranges submitted and not yet reaped
    uint64_t split_bytes = 0;    // see ReaderOptions
    bool direct = true;          // O_DIRECT: offsets and lengths are page multiples
    uint64_t alignment = 4096;   // of the destination, exactly: no more of it than this power of two
    bool huge = false;           // destination in huge pages
    uint64_t buffer_bytes = 0;   // about as much destination at most; reads then share places, which a probe may
    double seconds = 1;
};
ProbeTiming probe_reads(const ProbeReads& options, std::span<const ProbeRange> ranges);

struct ProbeMapping {
    std::vector<std::string> files;
    std::string warmer;         // "fault", "willneed", "memcpy:4x1": how a route's ranges are asked for
    std::string advice;         // on the mapping: "normal", "random", "sequential"
    uint32_t route = 8;         // ranges asked for at once
    bool touch = true;          // afterwards every cache line is read in place, as a matmul would
    double seconds = 1;
};
ProbeTiming probe_mapping(const ProbeMapping& options, std::span<const ProbeRange> ranges);

// Copies between two halves of `bytes` of memory, divided over threads, again and again; bytes copied are counted once.
ProbeTiming probe_copies(uint32_t threads, uint64_t bytes, double seconds);

}  // namespace moestream
