// The slab index: numbering, look-up by byte, and every way its table can be wrong.
#include "check.h"
#include "moestream/slab_index.h"

using namespace moestream;

static const std::vector<Shard> kShards{{"a.gguf", 1000}, {"b.gguf", 500}};

// Bank 0 (layer 1): two tensors of 4 experts in two shards. Bank 1 (layer 7): one tensor of 3 experts.
static std::vector<ExpertTensor> tensors() {
    return {{"blk.1.up", 0, 0, 100, 50, 4}, {"blk.7.up", 1, 0, 700, 100, 3}, {"blk.1.down", 0, 1, 0, 25, 4}};
}

static void test_numbers() {
    const SlabIndex index(kShards, tensors(), {1, 7});
    CHECK_EQ(index.experts(), 7u);
    CHECK_EQ(index.banks()[1].layer, 7);
    CHECK_EQ(index.banks()[1].first_expert, 4u);
    CHECK_EQ(index.banks()[0].count, 4u);
    CHECK(index.banks()[0].tensors == std::vector<uint32_t>{0, 2});
    CHECK_EQ(index.bank_of(3), 0u);
    CHECK_EQ(index.bank_of(4), 1u);
    CHECK_EQ(index.id_of(6), 2u);
    CHECK_EQ(index.slab_offset(1, 2), 900u);
}

static void test_tensor_at() {
    const SlabIndex index(kShards, tensors(), {1, 7});
    CHECK_EQ(index.tensor_at(0, 99), kNone);
    CHECK_EQ(index.tensor_at(0, 100), 0u);
    CHECK_EQ(index.tensor_at(0, 299), 0u);
    CHECK_EQ(index.tensor_at(0, 300), kNone);
    CHECK_EQ(index.tensor_at(0, 700), 1u);
    CHECK_EQ(index.tensor_at(0, 999), 1u);
    CHECK_EQ(index.tensor_at(0, 1000), kNone);
    CHECK_EQ(index.tensor_at(1, 0), 2u);
    CHECK_EQ(index.tensor_at(1, 100), kNone);
    CHECK_EQ(index.tensor_at(2, 0), kNone);
}

template <class Change>
static bool refused(Change change) {
    auto table = tensors();
    std::vector<int32_t> layers{1, 7};
    change(table, layers);
    return test::throws(ErrorKind::usage, [&] { SlabIndex(kShards, table, layers); });
}

static void test_refusals() {
    using T = std::vector<ExpertTensor>&;
    using L = std::vector<int32_t>&;
    CHECK(!refused([](T, L) {}));
    CHECK(refused([](T t, L) { t[2].count = 3; }));                        // a bank that disagrees with itself
    CHECK(refused([](T t, L) { t[0].bank = 2; }));                         // no such layer
    CHECK(refused([](T, L l) { l.push_back(8); }));                        // a bank without tensors
    CHECK(refused([](T t, L) { t[0].shard = 2; }));                        // no such shard
    CHECK(refused([](T t, L) { t[1].offset = 701; }));                     // a byte beyond its shard
    CHECK(refused([](T t, L) { t[1].offset = 2000; }));                    // starts beyond it
    CHECK(refused([](T t, L) { t[1].slab_bytes = UINT64_MAX / 2; }));      // a product that overflows
    CHECK(refused([](T t, L) { t[1].slab_bytes = 0; }));
    CHECK(refused([](T t, L) { t[1].count = 0; }));
    CHECK(refused([](T t, L) { t[1].offset = 299; t[1].count = 1; }));     // overlaps by one byte
    CHECK(!refused([](T t, L) { t[1].offset = 300; }));                    // touching is fine
}

int main() {
    test_numbers();
    test_tensor_at();
    test_refusals();
    const SlabIndex dense({{"a.gguf", 10}}, {}, {});
    CHECK_EQ(dense.experts(), 0u);
    CHECK_EQ(dense.tensor_at(0, 5), kNone);
    return test::checks_failed();
}
