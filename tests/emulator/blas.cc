/* The product of cuBLASLt (include/cublasLt.h), as a kernel of one thread for each column. */
#include "cublasLt.h"
#include "kernels/scalar.h"

const char *cublasLtGetStatusString(cublasStatus_t)
{
    return "emulated";
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *out)
{
    *out = NULL;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescInit(cublasLtMatmulDesc_t, cublasComputeType_t, cudaDataType)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void *,
                                              size_t)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutInit(cublasLtMatrixLayout_t l, cudaDataType, uint64_t n_rows, uint64_t n_columns,
                                        int64_t stride)
{
    *l = {n_rows, n_columns, stride};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceInit(cublasLtMatmulPreference_t)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t,
                                                    const void *, size_t)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t *out,
                                              int *n_out)
{
    *out = {{0}, CUBLAS_STATUS_SUCCESS};
    *n_out = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void *, const void *a,
                              cublasLtMatrixLayout_t of_a, const void *b, cublasLtMatrixLayout_t of_b, const void *beta,
                              const void *, cublasLtMatrixLayout_t, void *to, cublasLtMatrixLayout_t of_to,
                              const cublasLtMatmulAlgo_t *, void *, size_t, cudaStream_t stream)
{
    const uint16_t *w = (const uint16_t *)a, *x = (const uint16_t *)b;
    cublasLtMatrixLayoutOpaque_t lw = *of_a, lx = *of_b, ly = *of_to;
    float *y = (float *)to, kept = *(const float *)beta;
    auto multiply = [=] {
        size_t column = blockIdx.x;
        for (size_t row = 0; row < ly.n_rows; row++) {
            double sum = 0;
            for (size_t k = 0; k < lw.n_rows; k++)
                sum += (double)scalar_from_bf16(w[row * (size_t)lw.stride + k]) *
                       (double)scalar_from_bf16(x[column * (size_t)lx.stride + k]);
            float *at = &y[column * (size_t)ly.stride + row];
            *at = (float)(sum + (kept != 0 ? (double)(kept * *at) : 0));
        }
    };
    emulator::launch(stream, dim3((uint32_t)ly.n_columns), dim3(1), 0, multiply);
    return CUBLAS_STATUS_SUCCESS;
}
