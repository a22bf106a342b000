"""Residual networks whose modules have the names of torchvision's."""

from torch import nn


class Bottleneck(nn.Module):
    """Three convolutions, of which the second has the stride, and a shortcut around them."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu, self.downsample = nn.ReLU(inplace=True), None
        if stride != 1 or inputs != 4 * width:
            shortcut = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(4 * width))

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self, blocks, width, classes):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        inputs = width
        for stage, count in enumerate(blocks):
            layers = []
            for index in range(count):
                layers.append(Bottleneck(inputs, width << stage, 2 if stage and not index else 1))
                inputs = 4 * width << stage
            setattr(self, f"layer{stage + 1}", nn.Sequential(*layers))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(inputs, classes)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def perturb(model):
    """Sets batch norms as if the network had been trained: no mean is 0, no variance is 1."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data.uniform_(0.5, 1.5)
            module.bias.data.normal_(0, 0.1)
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 1.5)
