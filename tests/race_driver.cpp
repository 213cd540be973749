// Launches a backward kernel on several threads, for the thread sanitizer to watch.
//
// The launch gets a pool whose threads have nothing in common, so that every two shares of different threads are unordered.
// Every tensor that some row may read or write is there. `race` as argument lets all query rows of all heads and splits
// write to one place, in more launches: the sanitizer forgets accesses that lie too far back, so it may miss a race.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "abi/catalog_abi.h"

namespace {

constexpr int launches = 2, launches_to_find_a_race = 50;
constexpr std::int64_t batch = 2, nhead_q = 4, nhead_k = 2, seqlen_q = 150, seqlen_k = 768, hdim = 64, splits = 3;

// A dense (splits, batch, nhead, seqlen, hdim) tensor with numbers in [-1/2, 1/2).
template <class T>
struct Tensor {
    std::vector<T> elements;
    catalog_tensor view;

    Tensor(std::int64_t nhead, std::int64_t seqlen, std::int64_t width, std::int64_t parts = 1)
        : elements(static_cast<std::size_t>(parts * batch * nhead * seqlen * width)),
          view{elements.data(), nhead * seqlen * width, seqlen * width, width, batch * nhead * seqlen * width} {
        std::uint32_t state = 1;
        for (T& element : elements) element = static_cast<T>((state = state * 1664525 + 1013904223) / 0x1p32 - 0.5);
    }
};

// Thread i computes the shares i, i + threads, i + 2 threads, ...
void run_on_new_threads(catalog_pool*, std::int32_t count, std::int64_t shares, void (*body)(void*, std::int64_t),
                        void* context) {
    std::vector<std::thread> threads;
    for (std::int64_t first = 0; first < count; ++first)
        threads.emplace_back([=] {
            for (std::int64_t share = first; share < shares; share += count) body(context, share);
        });
    for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int argc, char** argv) {
    const bool race = argc > 1 && std::string(argv[1]) == "race";
    Tensor<float> q(nhead_q, seqlen_q, hdim), o = q, grad_o = q, dq = q, k(nhead_k, seqlen_k, hdim), v = k, dk = k, dv = k;
    Tensor<float> lse(nhead_q, seqlen_q, 1), delta = lse, slopes(nhead_q, 1, 1);
    Tensor<float> bias(nhead_q, seqlen_q, seqlen_k), dbias = bias, dq_acc(nhead_q, seqlen_q, hdim, splits);
    Tensor<std::uint8_t> randval(nhead_q, seqlen_q, seqlen_k);
    for (float& element : lse.elements) element = 5;
    for (auto* copy : {&o, &grad_o, &dq, &v, &dk, &dv, &delta, &dbias}) copy->view.data = copy->elements.data();

    catalog_args args;
    std::memset(&args, 0, sizeof args);
    args.struct_bytes = sizeof args;
    args.abi_version = CATALOG_ABI_VERSION;
    args.q = q.view, args.k = k.view, args.v = v.view, args.o = o.view, args.grad_o = grad_o.view, args.lse = lse.view;
    args.delta = delta.view, args.dq = dq.view, args.dk = dk.view, args.dv = dv.view, args.dq_acc = dq_acc.view;
    args.bias = bias.view, args.dbias = dbias.view, args.randval = randval.view, args.alibi_slopes = slopes.view;
    if (race)
        for (catalog_tensor* tensor : {&args.delta, &args.dq, &args.dq_acc}) *tensor = {tensor->data, 0, 0, 0, 0};
    args.batch = batch, args.nhead_q = nhead_q, args.nhead_k = nhead_k;
    args.seqlen_q = seqlen_q, args.seqlen_k = seqlen_k, args.hdim_q = args.hdim_v = hdim;
    args.window_left = -1, args.mask_corner = CATALOG_BOTTOM_RIGHT;
    args.scale = 0.125f, args.p_drop = 0.2f, args.num_splits = splits;
    catalog_pool pool{&run_on_new_threads};
    args.pool = &pool;
    for (int launch = 0; launch <= (race ? launches_to_find_a_race : launches); ++launch) {
        args.num_threads = launch ? 3 : 1;
        if (const int status = catalog_launch(&args, nullptr)) return std::printf("status %d\n", status), 2;
    }
    std::puts("done");
}
