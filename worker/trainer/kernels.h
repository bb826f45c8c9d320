#pragma once

#include <stddef.h>
#include <stdint.h>

/// The arithmetic of the reference trainer: matrix products and fused elementwise passes, in a
/// shared library of its own (libgradwire_nn.so). The library is built for several x86-64 levels
/// and the dynamic linker picks the best one for the CPU (glibc-hwcaps), so the interface is plain
/// C.
///
/// Matrices are row-major and dense. Pointers must not overlap unless said otherwise; any alignment
/// works, 64 bytes is fastest. Every function computes on the calling thread, in an order that
/// depends on the shapes alone, so the same inputs give the same bits on the same machine type.
/// Threads: safe.  NaN and Inf pass through as in IEEE arithmetic unless said otherwise.

#define GRADWIRE_NN_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/// Which build this is: "baseline", "x86-64-v3" or "x86-64-v4".
GRADWIRE_NN_API const char* gradwire_nn_variant(void);

/// y = x w^T + bias, then max(0, .) if relu (a NaN stays NaN).
/// Shapes: x[rows, in], w[out, in], bias[out] -> y[rows, out].
GRADWIRE_NN_API void gradwire_nn_dense_forward(size_t rows, size_t in, size_t out, const float* x,
                                               const float* w, const float* bias, int relu,
                                               float* y);

/// dw = dy^T x, or dw += dy^T x if accumulate.
/// Shapes: x[rows, in], dy[rows, out] -> dw[out, in].
GRADWIRE_NN_API void gradwire_nn_dense_grad_weight(size_t rows, size_t in, size_t out,
                                                   const float* x, const float* dy, int accumulate,
                                                   float* dw);

/// dx = dy w.  Shapes: dy[rows, out], w[out, in] -> dx[rows, in].
GRADWIRE_NN_API void gradwire_nn_dense_grad_input(size_t rows, size_t in, size_t out,
                                                  const float* dy, const float* w, float* dx);

/// Sets dy to 0 where y is 0 or less (y may be null: no masking), and adds the columns of the
/// result up into dbias.
/// Shapes: y[rows, out], dy[rows, out] -> dy in place, dbias[out].
GRADWIRE_NN_API void gradwire_nn_grad_activation(size_t rows, size_t out, const float* y, float* dy,
                                                 float* dbias);

/// Mean cross entropy of softmax(logits) and its gradient. Computed in double: 10 classes cost
/// nothing, and the loss can be checked against finite differences.
/// Shapes: logits[rows, classes], labels[rows] -> dlogits[rows, classes] (may be null: not wanted),
/// *loss the mean, *correct how many rows have their largest logit (the first of equals) at the
/// label. Labels must be below classes.
GRADWIRE_NN_API void gradwire_nn_softmax_cross_entropy(size_t rows, size_t classes,
                                                       const float* logits, const uint8_t* labels,
                                                       float* dlogits, double* loss,
                                                       size_t* correct);

/// The patches of one image around each pixel, zeros beyond the border, as rows of a matrix: a
/// convolution is then a matrix product. The kernel size is odd, stride 1, output as large as the
/// input.
/// Shapes: image[height, width, channels] -> columns[height * width, size * size * channels].
GRADWIRE_NN_API void gradwire_nn_im2col(size_t height, size_t width, size_t channels, size_t size,
                                        const float* image, float* columns);

/// The transpose of im2col: adds every patch back to where it came from.
/// Shapes: columns[height * width, size * size * channels] -> image[height, width, channels].
GRADWIRE_NN_API void gradwire_nn_col2im(size_t height, size_t width, size_t channels, size_t size,
                                        const float* columns, float* image);

/// Largest of each 2 x 2 square. Height and width must be even. A NaN may be lost.
/// Shapes: image[height, width, channels] -> pooled[height / 2, width / 2, channels].
GRADWIRE_NN_API void gradwire_nn_max_pool(size_t height, size_t width, size_t channels,
                                          const float* image, float* pooled);

/// Hands each pooled gradient to the first of its four inputs that was the largest, 0 to the
/// others. Shapes: image[height, width, channels], pooled and dpooled[height / 2, width / 2,
/// channels]
/// -> dimage[height, width, channels].
GRADWIRE_NN_API void gradwire_nn_max_pool_grad(size_t height, size_t width, size_t channels,
                                               const float* image, const float* pooled,
                                               const float* dpooled, float* dimage);

/// 1 if no element is NaN or infinite, else 0.
GRADWIRE_NN_API int gradwire_nn_all_finite(size_t n, const float* values);

/// One step of SGD with momentum: velocity = momentum velocity + (gradient + decay weight), then
/// weight -= rate velocity. Every product is rounded before it is added (no fused multiply-add), so
/// that all builds give the same bits and workers on different CPUs stay equal.
GRADWIRE_NN_API void gradwire_nn_sgd_update(size_t n, float rate, float momentum, float decay,
                                            const float* gradient, float* velocity, float* weight);

#ifdef __cplusplus
}
#endif
