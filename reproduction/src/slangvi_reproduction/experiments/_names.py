"""What data sets and metrics are called on pages."""

from __future__ import annotations

__all__ = ["DATASETS", "METRICS"]

DATASETS = {
    "australian": "Australian",
    "breast_cancer": "Breast cancer",
    "a1a": "a1a",
    "usps_3vs5": "USPS 3 vs 5",
    "boston": "Boston",
    "concrete": "Concrete",
    "energy": "Energy",
    "kin8nm": "Kin8nm",
    "naval": "Naval",
    "power": "Power",
    "wine": "Wine",
    "yacht": "Yacht",
    "mnist": "MNIST",
    "mnist_lenet": "MNIST, LeNet-5",
    "mnist_resnet": "MNIST, residual",
    "fashion_mnist_lenet": "Fashion-MNIST, LeNet-5",
    "fashion_mnist_resnet": "Fashion-MNIST, residual",
    "cubic_inside": "Noisy cubic, inside the data's range",
    "cubic_outside": "Noisy cubic, outside",
}
METRICS = {
    "negative_elbo_per_example": "−ELBO/N",
    "test_nll_nats": "NLL",
    "symmetric_kl": "KL",
    "bias_mean": "mean of the bias",
    "bias_variance": "variance of the bias",
    "test_rmse": "RMSE",
    "test_log_likelihood": "log-likelihood",
    "validation_rmse": "RMSE, held out",
    "validation_log_likelihood": "log-likelihood, held out",
    "test_error_percent": "error, %",
    "test_nll": "NLL",
    "ece": "ECE",
    "brier": "Brier",
    "sd_log_ratio": "absolute log sd ratio",
    "y_sd_log_ratio": "the same with noise",
    "sd_log_bias": "log sd ratio",
}
