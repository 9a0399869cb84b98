// SPDX-License-Identifier: Apache-2.0

package host

// listenError is the kind of an error of listen.
type listenError uint8

const (
	otherError listenError = iota
	inUse                  // another socket has the address
	forbidden              // permission denied
	noAddress              // this machine has no such address
)
