"""ResNet-18 and ResNet-50 in Flax Linen, without any mention of half.

    model = ResNet("resnet50", classes=1000)
    variables = model.init(key, images)  # params and batch_stats
    logits, new = model.apply(variables, images, train=True, mutable=["batch_stats"])

As in torchvision, the stride of a bottleneck is in its 3 x 3 convolution.
"""

import flax.linen as nn

# Blocks per stage, and whether each is a bottleneck.
ARCHS = {"resnet18": ((2, 2, 2, 2), False), "resnet50": ((3, 4, 6, 3), True)}


class ResNet(nn.Module):
    """`bn_axis` names the mapped axis of BatchNorm's statistics, if any.

    `width` is the number of channels in the first layer; a CPU needs fewer than 64.
    """

    arch: str
    classes: int
    width: int = 64
    bn_axis: str | None = None

    @nn.compact
    def __call__(self, x, train=False):
        init = nn.initializers.variance_scaling(2, "fan_out", "normal")
        options = {"use_bias": False, "kernel_init": init}

        def conv(x, channels, size, stride):
            x = nn.Conv(channels, (size, size), stride, size // 2, **options)(x)
            # torch's momentum. With Flax's default of 0.99, the statistics lag.
            return nn.BatchNorm(not train, momentum=0.9, axis_name=self.bn_axis)(x)

        stages, bottleneck = ARCHS[self.arch]
        x = nn.relu(conv(x, self.width, 7, 2))
        x = nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for i, blocks in enumerate(stages):
            for j in range(blocks):
                n, stride = self.width * 2**i, 2 if i > 0 and j == 0 else 1
                layers = [(n, 3, stride), (n, 3, 1)]
                if bottleneck:
                    layers = [(n, 1, 1), (n, 3, stride), (4 * n, 1, 1)]
                y = conv(x, *layers[0])
                for layer in layers[1:]:
                    y = conv(nn.relu(y), *layer)
                if x.shape != y.shape:
                    x = conv(x, y.shape[-1], 1, stride)
                x = nn.relu(x + y)
        return nn.Dense(self.classes)(x.mean((1, 2)))
