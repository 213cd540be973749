// Images of few channels: what the filter meets along the width becomes the channels of one position.
//
// A step of the main loop multiplies 64 channels at one element of the filter, or 32. With 3 channels most of it would be
// zeros. So the images are copied first: each position of the output's width gets the channels of all elements of a row
// of the filter, up to 64 of them, and the filter has a width of 1. Its weights, and their gradients, lie in memory as
// before.
#pragma once

#include "conv_copy.hpp"

namespace catalog::cuda {

struct FewCopy {
    const void* from;
    void* to;
    std::int64_t stride, pieces;  // between images; of eight elements of the copy
    int rows, extent, out;        // of an image; its width, and the output's
    int channels, taps, step, apart, pad;
    int padded;                   // channels of the copy
};

// The place of an element of the copy in its row of the image, negative where there is none.
__host__ __device__ __forceinline__ int place_of_few(const FewCopy& copy, int position, int element) {
    const int tap = element / copy.channels, at = position * copy.step - copy.pad + tap * copy.apart;
    return tap < copy.taps && at >= 0 && at < copy.extent ? at * copy.channels + element - tap * copy.channels : -1;
}

template <class T>
__global__ __launch_bounds__(channel_copy_threads) void copy_few(const __grid_constant__ FewCopy copy) {
    static_assert(sizeof(T) == 2);
    follow_last_kernel();
    const int in_position = copy.padded / 8;
    for (std::int64_t piece = std::int64_t{blockIdx.x} * channel_copy_threads + threadIdx.x; piece < copy.pieces;
         piece += std::int64_t{gridDim.x} * channel_copy_threads) {
        const std::int64_t index = piece / in_position, row = index / copy.out, image = row / copy.rows;
        const int position = static_cast<int>(index - row * copy.out);
        const int element = static_cast<int>(piece - index * in_position) * 8;
        const auto* const from = static_cast<const std::uint16_t*>(copy.from) + image * copy.stride +
                                 (row - image * copy.rows) * copy.extent * copy.channels;
        std::uint32_t x[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int place = place_of_few(copy, position, element + i);
            x[i] = place < 0 ? 0 : from[place];
        }
        static_cast<uint4*>(copy.to)[piece] =
            make_uint4(x[0] | x[1] << 16, x[2] | x[3] << 16, x[4] | x[5] << 16, x[6] | x[7] << 16);
    }
}

// The same convolution of a copy of the images. Forward and backward weight.
template <class Row>
class FewChannels {
   public:
    catalog_args args;
    const int channels;  // of the copy: 32 or 64
    catalog_status status = CATALOG_OK;

    static bool applies(const catalog_args& args) {
        const conv::Geometry of(args);
        return args.g == 1 && args.n > 0 && of.filter[2] > 1 && of.filter[2] * args.c <= block_channels;
    }

    FewChannels(const catalog_args& given, cudaStream_t stream)
        : args(given), channels(channels_of(given)), scratch(bytes_of(given), device(), stream) {
        const conv::Geometry of(given);
        for (int i = 0; i < 6 * conv::axes; ++i) geometry[i] = given.geometry[i];
        const auto width = [&](int list) -> std::int32_t& { return geometry[list * conv::axes + 2]; };
        width(0) = of.out[2];                                // the extent of the input
        width(2) = width(3) = width(4) = 1, width(5) = 0;  // filter, stride, dilation, padding
        args.geometry = geometry;
        args.c = given.c * of.filter[2];
        args.input.data = scratch.data;
        args.input.stride_first = std::int64_t{of.size[0]} * of.size[1] * of.out[2] * channels;
        if (!scratch.data) {
            status = (launched(), CATALOG_NO_MEMORY);
            return;
        }
        const FewCopy copy{given.input.data, scratch.data,  given.input.stride_first, bytes_of(given) / 16,
                           of.size[0] * of.size[1], of.size[2], of.out[2], static_cast<int>(given.c), of.filter[2],
                           of.stride[2], of.dilation[2], of.pad[2], channels};
        const std::int64_t blocks = std::min<std::int64_t>(parts(copy.pieces, channel_copy_threads), 16384);
        status = KernelLaunch(static_cast<unsigned>(blocks), channel_copy_threads, 0, stream, Start::early)
                     .run(copy_few<typename Row::dtype>, copy);
    }

   private:
    static int channels_of(const catalog_args& args) {
        return conv::Geometry(args).filter[2] * args.c <= half_block ? half_block : block_channels;
    }

    static std::int64_t bytes_of(const catalog_args& args) {
        const conv::Geometry of(args);
        return args.n * of.size[0] * of.size[1] * of.out[2] * channels_of(args) * std::int64_t{2};
    }

    static int device() {
        int current = 0;
        return cudaGetDevice(&current) == cudaSuccess ? current : 0;
    }

    const Scratch scratch;
    std::int32_t geometry[6 * conv::axes];
};

}  // namespace catalog::cuda
