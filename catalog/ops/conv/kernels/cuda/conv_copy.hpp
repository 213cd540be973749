// Copies of tensors that TMA cannot read, or whose groups it cannot tell apart: with zeros behind the channels.
#pragma once

#include "conv_call.hpp"
#include "cuda/kernel_launch.hpp"
#include "cuda/scratch.hpp"

namespace catalog::cuda {

// Rows of `groups` x `channels` elements, a `volume` of them in each image, are copied to rows of `groups` x `padded`.
struct ChannelCopy {
    const void* from;
    void* to;
    std::int64_t stride, pieces;  // between images; of eight elements of the copy
    int volume, groups, channels, padded;
};

inline constexpr int channel_copy_threads = 256;

template <class T>
__global__ __launch_bounds__(channel_copy_threads) void copy_channels(const __grid_constant__ ChannelCopy copy) {
    static_assert(sizeof(T) == 2);
    follow_last_kernel();
    const auto* const from = static_cast<const std::uint16_t*>(copy.from);
    const int in_group = copy.padded / 8;
    for (std::int64_t piece = std::int64_t{blockIdx.x} * channel_copy_threads + threadIdx.x; piece < copy.pieces;
         piece += std::int64_t{gridDim.x} * channel_copy_threads) {
        const std::int64_t of_group = piece / in_group, row = of_group / copy.groups, image = row / copy.volume;
        const int channel = static_cast<int>(piece - of_group * in_group) * 8;
        const std::int64_t place = image * copy.stride + (of_group - image * copy.volume * copy.groups) * copy.channels;
        const int left = copy.channels - channel;
        std::uint32_t x[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = i < left ? from[place + channel + i] : 0;
        static_cast<uint4*>(copy.to)[piece] =
            make_uint4(x[0] | x[1] << 16, x[2] | x[3] << 16, x[4] | x[5] << 16, x[6] | x[7] << 16);
    }
}

// Tensors as TMA reads them: themselves, or copies in memory of the launch's own.
template <class T>
class ReadableTensors {
   public:
    // `tensor` is replaced; groups that TMA must tell apart begin at multiples of `apart` channels.
    void add(ConvTensor& tensor, std::int64_t groups, std::int64_t apart) {
        const bool whole = reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0 && tensor.all_channels % 8 == 0 &&
                           (tensor.count <= 1 || tensor.stride % 8 == 0);
        if (whole && (groups == 1 || tensor.channels % apart == 0)) return;
        const std::int64_t unit = groups == 1 ? 8 : apart;
        const std::int64_t padded = parts(tensor.channels, unit) * unit, volume = conv::Geometry::volume(tensor.extents);
        copies[count] = {tensor.data, nullptr, tensor.stride, tensor.count * volume * groups * (padded / 8),
                         static_cast<int>(volume), static_cast<int>(groups), static_cast<int>(tensor.channels),
                         static_cast<int>(padded)};
        tensor.channels = padded;
        tensor.all_channels = groups * padded;
        tensor.stride = volume * tensor.all_channels;
        tensors[count++] = &tensor;
    }

    std::int64_t bytes() const {
        std::int64_t sum = 0;
        for (int i = 0; i < count; ++i) sum += bytes_of(i);
        return sum;
    }

    // Queues the copies into `memory`.
    catalog_status run(void* memory, cudaStream_t stream) {
        auto* to = static_cast<char*>(memory);
        for (int i = 0; i < count; ++i) {
            copies[i].to = to;
            tensors[i]->data = to;
            to += bytes_of(i);
            const std::int64_t blocks = std::min<std::int64_t>(parts(copies[i].pieces, channel_copy_threads), 4096);
            if (blocks == 0) continue;
            KernelLaunch launch(static_cast<unsigned>(blocks), channel_copy_threads, 0, stream, Start::early);
            if (const catalog_status status = launch.run(copy_channels<T>, copies[i]); status != CATALOG_OK)
                return status;
        }
        return CATALOG_OK;
    }

   private:
    std::int64_t bytes_of(int i) const { return parts(copies[i].pieces * 16, 1024) * 1024; }

    ChannelCopy copies[2]{};
    ConvTensor* tensors[2]{};
    int count = 0;
};

// The result where there are no images: gradients of the weight are zero.
template <class Row>
inline catalog_status without_images(const catalog_args& args, const conv::Geometry& of, cudaStream_t stream) {
    if constexpr (Row::direction == Direction::bwd_weight) {
        const std::size_t row = of.taps() * (args.c / args.g) * sizeof(typename Row::dtype);
        const std::size_t pitch = args.k > 1 ? args.weight.stride_first * sizeof(typename Row::dtype) : row;
        if (cudaMemset2DAsync(args.weight.data, pitch, 0, row, args.k, stream) != cudaSuccess)
            return launched(), CATALOG_DEVICE_ERROR;
    }
    return CATALOG_OK;
}

}  // namespace catalog::cuda
