// Calls a kernel library of another CPU under an emulator: arm_driver LIBRARY, which prints what the library says of itself,
// or arm_driver LIBRARY FUNCTION IMAGE.
//
// IMAGE is a file with the two arguments of the function and all that they point to. It begins with the places of the
// arguments in the file, 0 for a null pointer, the number of addresses in it, and their places; an address in the file is
// itself a place in it. The file is mapped, so results are written to it. The exit status is the function's.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

namespace {

struct Image {
    std::uint64_t arguments[2], addresses, places[];
};

[[nodiscard]] int fail(const char* what) {
    std::fprintf(stderr, "arm_driver: %s\n", what);
    return 99;
}

}  // namespace

int main(int count, char** words) {
    void* const library = dlopen(words[1], RTLD_NOW);
    void* const function = library ? dlsym(library, count > 2 ? words[2] : "catalog_describe") : nullptr;
    if (!function) return fail(dlerror());
    if (count < 4) return std::puts(reinterpret_cast<const char* (*)()>(function)()) < 0;

    const int file = open(words[3], O_RDWR);
    struct stat about;
    if (file < 0 || fstat(file, &about) != 0) return fail("no image");
    void* const mapped = mmap(nullptr, about.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) return fail("the image cannot be mapped");
    const Image& image = *static_cast<Image*>(mapped);
    const auto at = [&](std::uint64_t place) -> void* { return place ? static_cast<char*>(mapped) + place : nullptr; };
    for (std::uint64_t i = 0; i < image.addresses; ++i) {
        std::uint64_t place;
        std::memcpy(&place, at(image.places[i]), sizeof place);
        void* const address = at(place);
        std::memcpy(at(image.places[i]), &address, sizeof address);
    }
    using Entry = std::int32_t (*)(void*, void*);
    return reinterpret_cast<Entry>(function)(at(image.arguments[0]), at(image.arguments[1]));
}
